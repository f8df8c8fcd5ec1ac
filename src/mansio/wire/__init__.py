"""Kafka's wire formats: bytes to values and back, without I/O."""
