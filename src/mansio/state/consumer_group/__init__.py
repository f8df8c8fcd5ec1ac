"""Consumer group of KIP-848 as a state machine."""
