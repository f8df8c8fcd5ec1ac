"""Connections of Kafka clients: receive buffers, responses in order, and the memory that they share."""
