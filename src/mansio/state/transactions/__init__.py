"""Pure state machine of transactions."""
