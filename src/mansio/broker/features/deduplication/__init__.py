"""Deduplication of records by id."""
