"""Retention, log cleaner, storage health and the check of a data directory."""
