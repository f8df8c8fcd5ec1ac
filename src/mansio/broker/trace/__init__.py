"""Trace of records: what brokers write to the internal topic `__mansio_trace`, and how it is read."""
