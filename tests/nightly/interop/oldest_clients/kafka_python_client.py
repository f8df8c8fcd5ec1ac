"""Creates a topic, writes to it, and reads it in a consumer group; the oldest tested kafka-python runs it."""

import sys

from kafka import KafkaConsumer, KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic

servers, topic = sys.argv[1:]
KafkaAdminClient(bootstrap_servers=servers).create_topics([NewTopic(topic, 2, 1)])

producer = KafkaProducer(bootstrap_servers=servers, acks="all", compression_type="gzip")
sent = [producer.send(topic, b"value %d" % number, b"key %d" % (number % 7)) for number in range(101)]
for each in sent:
    each.get(timeout=60)

values = []
for limit in (50, 101):  # the second consumer continues where the first one has committed
    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=servers,
        group_id=topic,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        max_poll_records=1,
        consumer_timeout_ms=60_000,
    )
    for record in consumer:
        values.append(record.value)
        consumer.commit()
        if len(values) == limit:
            break
    consumer.close()
assert sorted(values) == sorted(b"value %d" % number for number in range(101)), values
