"""Record batches: header, reader, writer, compression."""
