"""Retention holds of pipelines."""
