"""Use cases of a broker with typed arguments and results, called by every protocol."""
