"""Classic consumer group as a state machine."""
