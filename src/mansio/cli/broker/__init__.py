"""Commands that run brokers, and check their data and environment."""
