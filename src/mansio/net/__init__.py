"""Outgoing Kafka connections.

Where brokers are (`addresses`), one asyncio connection (`connection`), the cluster behind it (`cluster`: metadata,
routing, retries), the questions every user of a cluster asks (`offsets`), and a loop in a thread for code that blocks
(`blocking`). The command line, followers, the Spark reader, `mansio.client` and the tests all reach brokers through
this room and no other.
"""
