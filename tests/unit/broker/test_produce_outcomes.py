"""Produce requests with several partitions: each gets the result of its own wait, whatever happens later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import NotLeaderOrFollower, RequestTimedOut
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.field_values import ACKS_ALL
from support.replicas import TOPIC, Cluster

if TYPE_CHECKING:
    from mansio.broker.services.produce import PendingProduce
    from support.replicas import Node


class Request:
    """One request with acks=all to both partitions of a broker, and the error codes that come back, by partition."""

    def __init__(self, node: Node, *values: bytes) -> None:
        self.codes: list[int] | None = None
        batches = [(index, build_batch([(0, None, value, ())])) for index, value in enumerate(values)]
        self.pending = node.service.produce.begin_produce(
            [(None, TOPIC.bytes, batches)], grants=None, acks=ACKS_ALL
        )
        self.pending.wait(30_000, self._done)

    def _done(self, pending: PendingProduce) -> None:
        ((_, _, results),) = pending.results
        self.codes = [0 if one.error is None else one.error.kafka_code for one in results]


def moved(cluster: Cluster) -> Request:
    """Broker 2 leads partition 0 by now and broker 1 does not know it when the request comes. Then it does, cuts off
    its batch and copies other records into the place. Partition 1 waits for broker 3, whose disk is slow."""
    cluster.run_for(1000)
    cluster.elect(2, index=0)
    cluster.tell(2, 3)
    cluster.run_for(700)
    cluster[2].append(b"other", b"records", index=0)
    copy = cluster[3].partitions[TOPIC.bytes, 0]
    cluster.run_until(lambda: copy.log.durable_end_offset == 2)
    cluster[3].background._latency_ms = lambda: 1500.0
    request = Request(cluster[1], b"lost", b"kept")
    cluster.tell(1)
    leader, former = (cluster[node_id].partitions[TOPIC.bytes, 0] for node_id in (2, 1))
    cluster.run_until(lambda: former.high_watermark == leader.end_offset == 2, 2500)
    assert cluster[1].values(0) == [b"other", b"records"], "the batch was cut off"
    assert request.codes is None, "partition 1 is not committed yet"
    return request


def test_a_batch_that_was_cut_off_is_not_confirmed_because_another_partition_took_longer() -> None:
    cluster = Cluster(partitions=2)
    request = moved(cluster)
    cluster.run_until(lambda: request.codes is not None, 5000)
    assert request.codes == [NotLeaderOrFollower.kafka_code, 0]
    assert cluster[1].values(1) == [b"kept"]


def test_a_batch_that_was_cut_off_is_not_confirmed_when_the_time_of_the_request_is_over() -> None:
    cluster = Cluster(partitions=2)
    request = moved(cluster)
    request.pending.time_out()
    assert request.codes == [NotLeaderOrFollower.kafka_code, RequestTimedOut.kafka_code]


def test_a_batch_that_was_committed_is_confirmed_though_its_leader_changed_before_the_answer() -> None:
    cluster = Cluster(partitions=2)
    cluster.run_for(1000)
    partition = cluster[1].partitions[TOPIC.bytes, 1]
    in_line = cluster.state(1)
    cluster.elect(2, index=1)
    cluster.tell(2, 3)
    request = Request(cluster[1], b"kept", b"lost")
    cluster.run_until(lambda: cluster[1].partitions[TOPIC.bytes, 0].high_watermark == 1)
    assert partition.replica.leader_epoch == in_line.leader_epoch, "not told yet"
    cluster.elect(3, index=0)
    cluster.tell(1, 2, 3)
    cluster.run_until(lambda: request.codes is not None, 5000)
    assert request.codes == [0, NotLeaderOrFollower.kafka_code]
