"""Membership in consumer groups."""
