"""SQLite metadata store of a single node."""
