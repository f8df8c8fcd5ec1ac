"""Composition of a node: broker runtime, embedded broker, cluster member."""
