"""Offline inspection of log directories."""
