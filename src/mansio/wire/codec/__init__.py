"""Message codecs compiled from schemas."""
