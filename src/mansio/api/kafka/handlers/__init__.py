"""Handlers of the Kafka protocol, one module per API family."""
