"""One partition on one broker: log, leadership, follower state, append validation."""
