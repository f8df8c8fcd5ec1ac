"""Broker settings: definitions, sources, reference."""
