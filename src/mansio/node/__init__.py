"""Composition of a node from its parts: broker process, broker runtime, embedded broker, cluster member."""
