"""Coordinator of classic groups, consumer groups and committed offsets."""
