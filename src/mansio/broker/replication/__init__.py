"""Replica manager, leadership changes, in-sync replicas and replica fetchers."""
