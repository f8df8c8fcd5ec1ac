"""Requests of a broker to the broker that is responsible for a key."""
