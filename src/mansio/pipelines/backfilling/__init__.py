"""The job `backfill`: applies a function to the records of a time range, and keeps the ranges of its table."""
