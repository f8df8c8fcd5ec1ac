"""Audit: who did, or was refused, what."""
