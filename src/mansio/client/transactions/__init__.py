"""Transactions of the client, and read-process-write loops."""
