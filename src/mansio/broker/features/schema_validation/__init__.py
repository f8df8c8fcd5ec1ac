"""Validation of the schemas of records at publish."""
