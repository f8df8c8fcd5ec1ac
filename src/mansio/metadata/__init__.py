"""Cluster metadata: metadata store, metadata image, controller, broker lifecycle."""
