"""Writes what an upgrade must keep, through the public client of the release that runs it: `write_data.py ADDRESS`.

Prints one JSON document, and then holds its leases until its standard input ends.
"""

import json
import sys
import time
from typing import Any

import mansio

with mansio.blocking.connect(sys.argv[1]) as client:
    admin = client.admin
    admin.create_topic(
        "orders", partitions=2, config={"retention.ms": "86400000", "segment.bytes": "1048576"}
    )
    admin.create_topic("prices", partitions=1, config={"cleanup.policy": "compact"})
    client.publish("orders", b"order 0", key=b"k", headers=[("n", b"0")])
    client.publish_many("orders", [b"order %d" % number for number in range(1, 200)])
    for number in range(10):
        client.publish("prices", b"%d" % number, key=b"%d" % (number % 5))
    read = sum(1 for _ in client.consume("orders", group="audit", to_end=True))
    assert read == 200, read
    settings = {
        "share.auto.offset.reset": "earliest",
        "share.record.lock.duration.ms": "5000",
        "share.session.timeout.ms": "6000",  # until then half of the partitions are this member's
    }
    admin.alter_group_config("billing", settings)
    with client.receive("orders", group="billing") as receiver:
        leased: list[Any] = []
        while len(leased) < 60:
            leased += receiver.poll(5000, max_records=10)
        acknowledged, rejected, held = leased[:40], leased[40], leased[41:]
        receiver.ack(acknowledged)
        rejected.reject("for the upgrade")
        while "dlq.orders" not in admin.list_topics():
            time.sleep(0.02)
        while not (dead := [each.value for each in client.consume("dlq.orders", to_end=True)]):
            time.sleep(0.02)
        written = {
            "records": sorted(
                [each.partition, each.offset, str(each.key), (each.value or b"").decode(), str(each.headers)]
                for topic in ("orders", "prices")
                for each in client.consume(topic, to_end=True)
            ),
            "topics": sorted(admin.list_topics()),
            "offsets": sorted(
                [each.topic, each.partition, found.offset]
                for each, found in admin.group_offsets("audit").items()
            ),
            "done": sorted((each.value or b"").decode() for each in [*acknowledged, rejected]),
            "held": sorted((each.value or b"").decode() for each in held),
            "dead": [(value or b"").decode() for value in dead],
        }
        print(json.dumps(written), flush=True)
        sys.stdin.read()
