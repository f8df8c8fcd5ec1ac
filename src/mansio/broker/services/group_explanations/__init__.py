"""What keeps a group from going on: the facts of each broker, and the answer of the group's coordinator."""
