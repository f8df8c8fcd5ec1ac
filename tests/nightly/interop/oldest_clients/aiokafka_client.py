"""Creates a topic, writes to it, and reads it in a consumer group; the oldest tested aiokafka runs it."""

import asyncio
import sys

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

servers, topic = sys.argv[1:]


async def main() -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    await admin.create_topics([NewTopic(topic, 2, 1)])
    await admin.close()

    producer = AIOKafkaProducer(bootstrap_servers=servers, enable_idempotence=True, compression_type="gzip")
    await producer.start()
    for number in range(101):
        await producer.send_and_wait(topic, b"value %d" % number, b"key %d" % (number % 7))
    await producer.stop()

    values: list[bytes] = []
    for limit in (50, 101):  # the second consumer continues where the first one has committed
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=servers,
            group_id=topic,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            max_poll_records=1,
        )
        await consumer.start()
        while len(values) < limit:
            record = await asyncio.wait_for(consumer.getone(), 60)
            values.append(record.value or b"null")
            await consumer.commit()
        await consumer.stop()
    assert sorted(values) == sorted(b"value %d" % number for number in range(101)), values


asyncio.run(main())
