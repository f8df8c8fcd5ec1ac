"""Codecs of Kafka's wire formats and of records in internal topics, without I/O."""
