"""Deduplication of records by id: state machines without I/O."""
