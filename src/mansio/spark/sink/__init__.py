"""Spark sinks: topics and Iceberg tables."""
