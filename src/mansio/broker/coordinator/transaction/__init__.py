"""Coordinator of transactions."""
