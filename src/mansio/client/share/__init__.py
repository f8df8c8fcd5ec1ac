"""Receiver: receives records of share groups on leases and acknowledges them."""
