"""Who has no right for a topic or group writes, reads and acknowledges no record of it, and a right that is removed
ends at once: also on a connection that has just used it, and in a request that waits."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from mansio.state.authorization.acls import Operation, ResourceType
from mansio.testing.broker import TestBroker
from mansio.wire.apis import fetch, produce, share_acknowledge, share_fetch
from mansio.wire.apis.share_acknowledge import AckBatch, AckPartition
from support.machine import scaled
from support.raw_peer import RawPeer, batch_of, fetch_frame, produce_frame
from support.record_rights import RecordRights
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.wire.apis.share_fetch import ShareFetchResponse

TOPIC, GROUP, TRANSACTIONAL_ID = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID
READ, WRITE = Operation.READ, Operation.WRITE
TOPIC_REFUSED, GROUP_REFUSED, TRANSACTIONAL_ID_REFUSED, UNKNOWN_TOPIC_ID = 29, 30, 53, 100
DEADLINE_S: Final = 30


class Room:
    """A broker with topics t and u, whose client may do what a test allows it."""

    def __init__(self, broker: TestBroker) -> None:
        self.broker = broker
        self.rights = RecordRights(broker)
        self.rights.allow_everything()
        for name in ("t", "u"):
            broker.client().admin.create_topic(name, partitions=1)
        self.rights.allow_nothing()
        _, _, port = broker.bootstrap_servers.rpartition(":")
        self.port = int(port)

    def topic_id(self, name: str) -> bytes:
        return bytes(self.broker._running().service.topics.find(name).topic_id.bytes)

    def end(self, name: str) -> int:
        """The end of the log of a topic."""
        return int(self.broker._running().service.partitions.find(name, None, 0).end_offset)

    def append(self, name: str, value: bytes = b"value") -> None:
        """Append a record as the broker itself."""

        async def work() -> None:
            partition = self.broker._running().service.partitions.find(name, None, 0)
            await partition.commit_promise(partition.append(batch_of(value)).end_offset)

        self.broker._call(work(), scaled(DEADLINE_S))


@contextmanager
def room() -> Iterator[Room]:
    with TestBroker(authorizer="acl") as broker:
        yield Room(broker)


def codes_of_produce(
    peer: RawPeer, topics: Any, version: int = 9, transactional_id: str | None = None
) -> Any:
    """Error codes of a Produce request, in the order of its topics."""
    peer.send(b"".join(produce.encode_request(version, 1, "raw", -1, 10_000, topics, transactional_id)))
    answer = peer.frame()
    assert answer is not None
    found = produce.decode_response(version, answer).topics
    return [result.error_code for _, _, results in found for result in results]


def fetched(peer: RawPeer, frame: bytes, version: int = 12) -> list[fetch.FetchedPartition]:
    peer.send(frame)
    return answer_of_fetch(peer, version)


def answer_of_fetch(peer: RawPeer, version: int = 12) -> list[fetch.FetchedPartition]:
    answer = peer.frame()
    assert answer is not None
    return [one for _, _, parts in fetch.decode_response(version, answer).topics for one in parts]


@pytest.mark.full
def test_each_topic_of_a_produce_request_is_refused_alone_whether_it_exists_or_not() -> None:
    with room() as one, RawPeer(one.port) as peer:
        one.rights.allow(TOPIC, "t", WRITE)
        batch = batch_of(b"v")
        by_name = [(name, None, [(0, batch)]) for name in ("u", "t", "absent")]
        assert codes_of_produce(peer, by_name) == [TOPIC_REFUSED, 0, TOPIC_REFUSED]
        by_id = [
            (None, each, [(0, batch)]) for each in (one.topic_id("u"), bytes(15) + b"1", one.topic_id("t"))
        ]
        assert codes_of_produce(peer, by_id, 13) == [TOPIC_REFUSED, UNKNOWN_TOPIC_ID, 0]
        assert (one.end("t"), one.end("u")) == (2, 0)


@pytest.mark.row("A8")
def test_a_producer_that_has_just_written_writes_no_more_when_its_right_is_removed() -> None:
    with room() as one, RawPeer(one.port) as peer:
        one.rights.allow(TOPIC, "t", WRITE)
        batch = batch_of(b"v")
        assert [peer.produce("t", batch).error_code for _ in range(3)] == [0, 0, 0]
        (connection,) = (
            each for each in one.broker._running().server._connections if each.template is not None
        )
        for _ in range(2):
            one.rights.remove(TOPIC, "t", WRITE)
            before = one.end("t")
            assert [peer.produce("t", batch).error_code for _ in range(10)] == [TOPIC_REFUSED] * 10
            assert one.end("t") == before
            one.rights.allow(TOPIC, "t", WRITE)
            assert [peer.produce("t", batch).error_code for _ in range(10)] == [0] * 10
        assert connection.template_revision == one.rights.authorizer.revision


@pytest.mark.full
def test_another_request_of_the_connection_does_not_renew_the_right_of_its_template() -> None:
    """NATS advisory 2026-16 and its kind: a fast path that another path validates."""
    with room() as one, RawPeer(one.port) as peer:
        one.rights.allow(TOPIC, "t", WRITE, READ)
        one.rights.allow(TOPIC, "u", WRITE)
        batch = batch_of(b"v")
        assert [peer.produce("t", batch).error_code for _ in range(3)] == [0, 0, 0]
        one.rights.remove(TOPIC, "t", WRITE)
        assert fetched(peer, fetch_frame("t"))[0].error_code == 0
        assert peer.produce("u", batch).error_code == 0
        assert peer.produce("t", batch).error_code == TOPIC_REFUSED
        assert (one.end("t"), one.end("u")) == (3, 1)


@pytest.mark.full
def test_a_refused_request_without_a_response_closes_the_connection() -> None:
    with room() as one:
        one.rights.allow(TOPIC, "t", WRITE)
        with RawPeer(one.port) as peer:
            for _ in range(3):
                peer.send(produce_frame([("t", None, [(0, batch_of(b"v"))])], acks=0))
            wait_until(lambda: one.end("t") == 3, scaled(DEADLINE_S), "the records")
            one.rights.remove(TOPIC, "t", WRITE)
            peer.send(produce_frame([("t", None, [(0, batch_of(b"v"))])], acks=0))
            assert peer.closed()
        assert one.end("t") == 3


@pytest.mark.full
def test_a_transactional_id_that_the_client_may_not_use_refuses_the_whole_request() -> None:
    with room() as one, RawPeer(one.port) as peer:
        one.rights.allow(TOPIC, "t", WRITE)
        topics = [("t", None, [(0, batch_of(b"v"))]), ("u", None, [(0, batch_of(b"v"))])]
        refused = codes_of_produce(peer, topics, transactional_id="x")
        assert refused == [TRANSACTIONAL_ID_REFUSED] * 2
        one.rights.allow(TRANSACTIONAL_ID, "x", WRITE)
        assert codes_of_produce(peer, topics, transactional_id="x") == [0, TOPIC_REFUSED]
        one.rights.remove(TRANSACTIONAL_ID, "x", WRITE)
        assert codes_of_produce(peer, topics, transactional_id="x") == [TRANSACTIONAL_ID_REFUSED] * 2
        assert (one.end("t"), one.end("u")) == (1, 0)


@pytest.mark.full
def test_each_topic_of_a_fetch_is_refused_alone_whether_it_exists_or_not() -> None:
    with room() as one, RawPeer(one.port) as peer:
        one.rights.allow(TOPIC, "t", READ)
        one.append("t")
        one.append("u")
        part = [fetch.FetchPartition(0, -1, 0, -1, -1, 1 << 20)]
        limits: Any = {"max_wait_ms": 30_000, "min_bytes": 1 << 20, "max_bytes": 1 << 20}
        names = [(name, None, part) for name in ("u", "t", "absent")]
        found = fetched(peer, fetch.encode_request(12, 1, "raw", names, **limits))  # errors do not wait
        assert [each.error_code for each in found] == [TOPIC_REFUSED, 0, TOPIC_REFUSED]
        assert [bool(each.records) for each in found] == [False, True, False]
        ids = [(None, each, part) for each in (one.topic_id("u"), bytes(15) + b"1", one.topic_id("t"))]
        found = fetched(peer, fetch.encode_request(13, 1, "raw", ids, **limits), 13)
        assert [each.error_code for each in found] == [TOPIC_REFUSED, UNKNOWN_TOPIC_ID, 0]
        one.rights.remove(TOPIC, "t", READ)
        found = fetched(peer, fetch.encode_request(13, 1, "raw", ids, **limits), 13)
        assert [each.error_code for each in found] == [TOPIC_REFUSED, UNKNOWN_TOPIC_ID, TOPIC_REFUSED]
        assert not any(each.records for each in found)


@pytest.mark.row("A8")
@pytest.mark.full
def test_a_fetch_that_waits_returns_nothing_that_came_after_its_right_was_removed() -> None:
    with room() as one, RawPeer(one.port) as peer:
        one.rights.allow(TOPIC, "t", READ)
        peer.send(fetch_frame("t", wait_ms=60_000))
        parked = one.broker._running().service.fetch.parked
        wait_until(lambda: bool(parked), scaled(DEADLINE_S), "the parked fetch")
        one.rights.remove(TOPIC, "t", READ)
        one.append("t", b"secret")
        (found,) = answer_of_fetch(peer)
        assert (found.error_code, bytes(found.records or b"")) == (TOPIC_REFUSED, b"")


class ShareMember:
    """A member of group g that asks for records of t."""

    def __init__(self, one: Room, peer: RawPeer) -> None:
        self._peer = peer
        self._topics = [(one.topic_id("t"), 0)]
        self.epoch = 0

    def send(self, *acks: tuple[int, int], wait_ms: int = 500) -> None:
        batches = [AckBatch(first, last, b"\x01") for first, last in acks]
        ((topic_id, index),) = self._topics
        topics = [(topic_id, [AckPartition(index, batches)])]
        limits: Any = {"max_wait_ms": wait_ms, "min_bytes": 1, "max_bytes": 1 << 20, "batch_size": 10}
        self._peer.send(
            share_fetch.encode_request(
                2, 1, "raw", "g", "member", self.epoch, topics, max_records=1, acquire_mode=1, **limits
            )
        )

    def answer(self) -> ShareFetchResponse:
        frame = self._peer.frame()
        assert frame is not None
        found = share_fetch.decode_response(2, frame)
        self.epoch += not found.error_code
        return found

    def ask(self, *acks: tuple[int, int], wait_ms: int = 500) -> ShareFetchResponse:
        self.send(*acks, wait_ms=wait_ms)
        return self.answer()

    def acknowledge(self, first: int, last: int) -> tuple[int, int]:
        """The code of the answer to a ShareAcknowledge, and that of the partition."""
        ((topic_id, index),) = self._topics
        topics = [(topic_id, [AckPartition(index, [AckBatch(first, last, b"\x01")])])]
        self._peer.send(share_acknowledge.encode_request(2, 1, "raw", "g", "member", self.epoch, topics))
        frame = self._peer.frame()
        assert frame is not None
        found = share_acknowledge.decode_response(2, frame)
        self.epoch += not found.error_code
        return found.error_code, found.topics[0][1][0].error_code if found.topics else 0


@contextmanager
def share_room() -> Iterator[tuple[Room, ShareMember]]:
    """A room whose client may receive in group g, and whose member has a session."""
    with room() as one, RawPeer(one.port) as peer:
        one.rights.allow_everything()
        one.broker.client().admin.alter_group_config("g", {"share.auto.offset.reset": "earliest"})
        one.rights.allow_nothing()
        one.rights.allow(TOPIC, "t", READ)
        one.rights.allow(GROUP, "g", READ)
        member = ShareMember(one, peer)
        assert member.ask(wait_ms=0).error_code == 0
        yield one, member


def part_of(answer: ShareFetchResponse) -> share_fetch.SharePartitionData:
    ((_, (part,)),) = answer.topics
    return part


@pytest.mark.full
@pytest.mark.parametrize(("kind", "name", "code"), [(GROUP, "g", GROUP_REFUSED), (TOPIC, "t", TOPIC_REFUSED)])
def test_a_share_session_ends_to_give_and_take_when_a_right_is_removed(
    kind: ResourceType, name: str, code: int
) -> None:
    with share_room() as (one, member):
        for _ in range(3):
            one.append("t")
        first = part_of(member.ask())
        assert [each[:2] for each in first.acquired] == [(0, 0)]
        one.rights.remove(kind, name, READ)
        answer = member.ask((0, 0))
        if kind is GROUP:
            assert answer.error_code == code
            assert member.acknowledge(0, 0) == (code, 0)
        else:
            part = part_of(answer)
            assert (part.error_code, part.acknowledge_error_code) == (code, code)
            assert not part.acquired
            assert member.acknowledge(0, 0) == (0, code)
        one.rights.allow(kind, name, READ)
        again = part_of(member.ask((0, 0)))  # the lease is as it was
        assert (again.acknowledge_error_code, [each[:2] for each in again.acquired]) == (0, [(1, 1)])
        assert member.acknowledge(1, 1) == (0, 0)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "name", "code"), [(GROUP, "g", GROUP_REFUSED), (TOPIC, "t", TOPIC_REFUSED)])
def test_a_share_fetch_that_waits_leases_nothing_that_came_after_a_right_was_removed(
    kind: ResourceType, name: str, code: int
) -> None:
    with share_room() as (one, member):
        member.send(wait_ms=60_000)
        parked = one.broker._running().service.share_partition_manager.parked
        wait_until(lambda: bool(parked), scaled(DEADLINE_S), "the parked fetch")
        one.rights.remove(kind, name, READ)
        one.append("t", b"secret")
        answer = member.answer()
        assert (answer.error_code or part_of(answer).error_code) == code
        assert not any(part.acquired for _, parts in answer.topics for part in parts)
        one.rights.allow(kind, name, READ)
        if answer.error_code:
            member.epoch = 0  # as clients do, which begin a new session after such an error
        ((offset, _, deliveries),) = part_of(member.ask()).acquired
        assert (offset, deliveries) == (0, 1)
        assert member.acknowledge(0, 0) == (0, 0)
