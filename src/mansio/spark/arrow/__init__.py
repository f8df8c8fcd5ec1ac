"""Conversion between record batches and Arrow columns, without an object per record. Pure: bytes in, bytes out;
no Spark.
"""
