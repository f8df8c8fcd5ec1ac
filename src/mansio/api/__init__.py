"""The other doors: everything that is not the Kafka protocol. The broker's service does the work."""
