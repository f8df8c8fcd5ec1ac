"""Properties that the records of a partition may have: one package each, and the list of all."""
