"""Formats of schemas: each module parses the schemas of one format."""
