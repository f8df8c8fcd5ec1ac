"""Compatibility of schemas: whether a reader with one schema can read what was written with another one."""
