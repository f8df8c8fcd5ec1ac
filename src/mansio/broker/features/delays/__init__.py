"""Delayed records, and the schedules that append records at due times."""
