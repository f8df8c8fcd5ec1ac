"""Recurring schedules: when they are due, which missed firings are caught up, and the schedules of a partition."""
