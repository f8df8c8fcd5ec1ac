"""Spark source: offsets, read plans and readers."""
