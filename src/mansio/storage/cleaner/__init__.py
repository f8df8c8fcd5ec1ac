"""Log cleaner: compaction of closed segments."""
