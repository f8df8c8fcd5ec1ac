"""Members of classic groups and consumer groups, and assignors."""
