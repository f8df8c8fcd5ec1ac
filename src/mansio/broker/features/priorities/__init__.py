"""Priorities of the records of a partition."""
