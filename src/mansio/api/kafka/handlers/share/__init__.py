"""Handlers of share groups (KIP-932), and of Mansio's own requests about leases."""
