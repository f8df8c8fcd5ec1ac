"""Record batches and Arrow columns: the one to the other, no object per record. Pure: bytes in, bytes out; no Spark."""
