"""Consumer: fetches record batches, decodes them, delivers messages and commits offsets."""
