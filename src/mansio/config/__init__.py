"""Settings of brokers, topics and groups: definitions, sources, generated reference."""
