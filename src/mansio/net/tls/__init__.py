"""TLS of listeners and clients: contexts from PEM files, their renewal, and the acceptor of TLS connections."""
