"""Audit of a broker: refusals and administrative changes, as JSON lines and as records of an internal topic."""
