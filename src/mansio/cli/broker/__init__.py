"""Commands that run brokers and examine their data."""
