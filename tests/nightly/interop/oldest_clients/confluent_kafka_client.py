"""Creates a topic, writes to it, and reads it in a consumer group; the oldest tested confluent-kafka runs it."""

import sys

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

servers, topic = sys.argv[1:]
admin = AdminClient({"bootstrap.servers": servers})
admin.create_topics([NewTopic(topic, 2, 1)])[topic].result()

options = {"bootstrap.servers": servers, "enable.idempotence": True, "compression.type": "lz4"}
producer = Producer(options)
for number in range(100):
    producer.produce(topic, b"value %d" % number, key=b"key %d" % (number % 7))
assert producer.flush(60) == 0

transaction = Producer({"bootstrap.servers": servers, "transactional.id": topic})
transaction.init_transactions()
for value, end in (
    (b"aborted", transaction.abort_transaction),
    (b"value 100", transaction.commit_transaction),
):
    transaction.begin_transaction()
    transaction.produce(topic, value)
    transaction.flush(60)
    end()

values: list[bytes] = []
for _ in range(2):  # the second consumer continues where the first one has committed
    options = {"bootstrap.servers": servers, "group.id": topic, "auto.offset.reset": "earliest"}
    consumer = Consumer({**options, "enable.auto.commit": False})
    consumer.subscribe([topic])
    limit = 50 if not values else 101
    while len(values) < limit:
        message = consumer.poll(60)
        assert message is not None, f"{len(values)} values arrived"
        assert message.error() is None, message.error()
        values.append(message.value() or b"null")
        consumer.commit(message=message, asynchronous=False)
    consumer.close()
assert sorted(values) == sorted(b"value %d" % number for number in range(101)), values
