"""Recovery of a log when it is opened."""
