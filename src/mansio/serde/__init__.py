"""Schemas of keys and values, and their encoding: Avro, JSON Schema and Protobuf, as schema registries have them."""
