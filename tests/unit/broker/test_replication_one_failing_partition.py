"""One partition whose disk fails keeps none of the others from being copied."""

from __future__ import annotations

import errno

from support.replicas import TOPIC, Cluster


def test_a_disk_that_fails_while_a_log_is_cut_keeps_no_other_partition_of_that_leader_from_being_copied() -> (
    None
):
    cluster = Cluster(partitions=2)
    cluster.run_for(1000)
    old = cluster[1]
    cluster.network.isolate(1)
    old.append(b"never copied", index=0)
    cluster.run_for(50)
    for index in (0, 1):
        cluster.elect(2, index=index)
    cluster.tell(2, 3)
    cluster.run_for(50)
    old.disk.fail_when = lambda operation, path: (
        errno.EIO if operation == "list" and path.endswith("t-0") else None
    )
    cluster.network.cut.clear()
    cluster.tell(1)
    acks = [cluster[2].append(b"next", index=index) for index in (0, 1)]
    copied = old.partitions[TOPIC.bytes, 1].log
    cluster.run_until(lambda: copied.durable_end_offset == 1, 15_000)
    assert old.partitions[TOPIC.bytes, 0].log.failure is not None
    cluster.run_until(lambda: all(ack.acknowledged for ack in acks), 15_000)
