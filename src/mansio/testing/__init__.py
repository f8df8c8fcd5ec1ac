"""Simulated ports for tests: disk, clock, scheduler, metadata store."""
