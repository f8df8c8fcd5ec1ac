"""Share group of KIP-932 as a state machine."""
