"""Producer: batching, sending and outcomes."""
