"""Coordinators of groups and share groups on internal topics."""
