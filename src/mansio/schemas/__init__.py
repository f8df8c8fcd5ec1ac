"""Schemas of keys and values: Avro, Protobuf and JSON Schema as Arrow types, decoders, and the schema registry."""
