"""Receiver of share groups: leases and acknowledgements."""
