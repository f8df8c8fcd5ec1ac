"""Requests of a broker to the broker that is responsible for a key, and the caller for which it sends them."""
