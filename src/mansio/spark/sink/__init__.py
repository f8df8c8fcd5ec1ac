"""Spark sinks: topics and tables."""
