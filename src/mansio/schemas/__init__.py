"""Schemas of keys and values: Avro, Protobuf and JSON Schema as Arrow types, and their decoders."""
