"""Protocols that a broker serves: decode a request, call a service, encode the result."""
