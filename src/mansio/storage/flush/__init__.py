"""Flush state, group commit and flush jobs."""
