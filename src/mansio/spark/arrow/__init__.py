"""Conversion between record batches and Arrow columns, without I/O and without an object per record."""
