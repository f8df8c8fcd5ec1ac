"""Share partition of KIP-932 as a state machine."""
