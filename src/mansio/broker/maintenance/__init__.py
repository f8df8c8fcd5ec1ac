"""Retention, log cleaner, log scrubber, removal of orphaned directories, and the check of a data directory."""
