"""Coordinator and persister of share groups."""
