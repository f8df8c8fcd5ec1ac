"""Codecs of record batches: headers, records, compression."""
