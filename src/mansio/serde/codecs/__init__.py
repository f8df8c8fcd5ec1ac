"""Codecs: each module encodes and decodes the values of one format of schemas, without pyarrow."""
