"""Consumer: fetching, positions and delivery of messages."""
