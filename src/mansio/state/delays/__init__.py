"""Delayed records: the records of a partition that are not due yet."""
