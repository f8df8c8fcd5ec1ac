"""Coordinator of the schema registry on the topic `_schemas`."""
