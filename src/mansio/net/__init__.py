"""Outgoing Kafka connections (Kafka's NetworkClient and Metadata).

`addresses` parses bootstrap addresses, `connection` is one asyncio connection, `cluster` adds metadata, routing and
retries, `offsets` sends the requests about offsets of partitions, and `blocking` runs an event loop in a thread for
blocking callers. The client, the command line, followers and Spark connect to brokers through this package only.
"""
