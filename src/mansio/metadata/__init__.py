"""Cluster metadata: store, image, controller, broker lifecycle."""
