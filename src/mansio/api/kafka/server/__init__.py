"""Listener, connections and request routing of the Kafka protocol."""
