"""Byte-rate quotas over real sockets: a client above its quota gets a throttle time and is paused; others are not
affected."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import httpx
import pytest

import mansio
from mansio.api.grpc import mansio_pb2 as pb
from mansio.client.admin.quotas import DEFAULT_ENTITY, Quota
from mansio.errors import InvalidRequest
from mansio.testing.broker import TestBroker
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch, produce
from support.machine import scaled
from support.present import present
from support.raw_peer import RawPeer, batch_of
from support.sqs import sqs_client

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BURST_MS = 100
RATE = 50_000  # bytes/s: 5,000 at once, and every 5,000 more cost 100 ms
EARLY_S = 0.02  # clocks and timers are not more exact than that

_numbers = itertools.count(1)


class World(NamedTuple):
    """A broker with short bursts, and an administrator of it."""

    broker: mansio.Broker
    client: mansio.blocking.Client

    @property
    def port(self) -> int:
        return int(self.broker.address.rpartition(":")[2])

    def set(self, client_id: str, **values: float | None) -> None:
        self.client.admin.quotas.set(client_id=client_id, values=values)


@contextmanager
def world_in(directory: Path) -> Iterator[World]:
    with (
        mansio.Broker(directory, listeners="127.0.0.1:0", quota_burst_ms=BURST_MS) as broker,
        mansio.blocking.connect(broker.address) as client,
    ):
        yield World(broker, client)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world_in(tmp_path_factory.mktemp("quotas") / "data") as made:
        yield made


@pytest.fixture
def topic(world: World) -> str:
    name = f"t{next(_numbers)}"
    world.client.admin.create_topic(name)
    return name


@pytest.fixture
def me() -> str:
    """A client id that no other client uses."""
    return f"client-{next(_numbers)}"


def produce_frame(client_id: str, topic: str, size_bytes: int, *, acks: int = 1) -> bytes:
    topics = [(topic, None, [(0, batch_of(b"x" * size_bytes))])]
    return b"".join(produce.encode_request(9, 1, client_id, acks, 10_000, topics))


def send(peer: RawPeer, client_id: str, topic: str, size_bytes: int, *, acks: int = 1) -> None:
    peer.send(produce_frame(client_id, topic, size_bytes, acks=acks))


def written(peer: RawPeer) -> int:
    """The pause of the next produce response, in ms."""
    frame = peer.frame()
    assert frame is not None
    answer = produce.decode_response(9, frame)
    assert answer.topics[0][2][0].error_code == 0
    return answer.throttle_ms


def write(peer: RawPeer, client_id: str, topic: str, size_bytes: int, **more: Any) -> int:
    send(peer, client_id, topic, size_bytes, **more)
    return written(peer)


def read(
    peer: RawPeer, client_id: str, topic: str, *, offset: int = 0, max_bytes: int = 1 << 20, wait_ms: int = 0
) -> tuple[int, fetch.FetchedPartition]:
    """(the pause of the response in ms, what was fetched)"""
    wanted = [(topic, None, [fetch.FetchPartition(0, -1, offset, -1, -1, max_bytes)])]
    frame = fetch.encode_request(
        12, 1, client_id, wanted, max_wait_ms=wait_ms, min_bytes=1, max_bytes=max_bytes
    )
    peer.send(frame)
    answer = peer.frame()
    assert answer is not None
    found = fetch.decode_response(12, answer)
    return found.throttle_ms, found.topics[0][2][0]


@pytest.mark.row("A8")
def test_a_producer_over_its_quota_is_asked_to_pause_and_not_read_until_then(
    world: World, topic: str, me: str
) -> None:
    world.set(me, producer_byte_rate=RATE)
    with RawPeer(world.port) as peer, RawPeer(world.port) as other:
        seconds = round(scaled(1))  # of pause: enough for what the other client does meanwhile
        begun = time.monotonic()
        assert write(peer, me, topic, 4000) == 0, "within the burst"
        pause_ms = write(peer, me, topic, seconds * RATE)
        answered_at = time.monotonic()
        filled_ms = 1000 * (answered_at - begun)  # while these went to and fro
        assert 1000 * seconds - 20 - filled_ms <= pause_ms <= 1000 * seconds + 20
        send(peer, me, topic, 100)  # a client that does not know of pauses
        assert write(other, f"not {me}", topic, 100_000) == 0, "another client is not held up"
        assert time.monotonic() - answered_at < pause_ms / 1000
        written(peer)
        assert time.monotonic() - answered_at >= pause_ms / 1000 - EARLY_S
    counters = present(world.broker._broker).service.quotas.counters
    assert counters.produce_throttled >= 1
    assert counters.produce_throttled_ms >= pause_ms


@pytest.mark.parametrize("acks", [0, 1, -1])
def test_bytes_come_in_at_the_rate_whatever_the_acknowledgement(
    world: World, topic: str, me: str, acks: int
) -> None:
    world.set(me, producer_byte_rate=RATE)
    with RawPeer(world.port) as peer:
        begun = time.monotonic()
        for _ in range(10):
            send(peer, me, topic, 3000, acks=acks)
        send(peer, me, topic, 1, acks=1)  # is answered when the ten before it have been read
        for _ in range(10 if acks else 0):
            written(peer)
        written(peer)
        took_s = time.monotonic() - begun
    expected_s = 10 * 3000 / RATE - BURST_MS / 1000
    assert expected_s - EARLY_S <= took_s < scaled(10 * expected_s)


def test_a_quota_belongs_to_the_client_id_not_to_the_connection(world: World, topic: str, me: str) -> None:
    world.set(me, producer_byte_rate=RATE)
    with RawPeer(world.port) as first:
        assert write(first, me, topic, 500_000) > 0
    with RawPeer(world.port) as second:
        assert write(second, me, topic, 1) > 0, "coming back does not pay the debt"


@pytest.mark.row("A8")
def test_a_consumer_over_its_quota_gets_an_empty_answer_and_the_rest_later(
    world: World, topic: str, me: str
) -> None:
    with RawPeer(world.port) as peer:
        for size_bytes in (2000, 2000, 60_000, 2000):
            peer.produce(topic, batch_of(b"x" * size_bytes))
    world.set(me, consumer_byte_rate=RATE)
    with RawPeer(world.port) as peer, RawPeer(world.port) as second:
        pause_ms, first = read(peer, me, topic)
        assert 2000 < first.records_bytes <= RATE * BURST_MS / 1000, "no more than a burst at once"
        assert pause_ms == 0
        pause_ms, more = read(peer, me, topic, offset=2)
        assert more.records_bytes > 60_000, "but for a batch that is larger"
        assert pause_ms > 0
        begun = time.monotonic()
        empty_ms, nothing = read(second, me, topic, offset=3, wait_ms=8000)
        assert time.monotonic() - begun < scaled(4), "a throttled fetch is answered, not parked"
        assert (nothing.records_bytes, nothing.error_code, nothing.high_watermark) == (0, 0, 4)
        assert 0 < empty_ms <= pause_ms
        while not (rest := read(second, me, topic, offset=3)[1]).records_bytes:
            assert time.monotonic() - begun < scaled(10)  # a timer a little early costs one more empty answer
        assert rest.records_bytes > 2000
        assert time.monotonic() - begun >= empty_ms / 1000 - EARLY_S
    with RawPeer(world.port) as free:
        pause_ms, everything = read(free, f"not {me}", topic)
        assert (pause_ms, everything.records_bytes > 20_000) == (0, True)
    assert present(world.broker._broker).service.quotas.counters.fetch_throttled >= 1


def test_a_batch_larger_than_a_burst_is_still_read(world: World, topic: str, me: str) -> None:
    with RawPeer(world.port) as peer:
        peer.produce(topic, batch_of(b"x" * 9000))
        world.set(me, consumer_byte_rate=RATE)
        pause_ms, got = read(peer, me, topic)
        assert got.records_bytes > 9000
        assert pause_ms == pytest.approx(80, abs=40)


def test_a_parked_fetch_is_charged_when_it_is_answered(world: World, topic: str, me: str) -> None:
    world.set(me, consumer_byte_rate=RATE)
    with RawPeer(world.port) as peer, RawPeer(world.port) as writer:
        wanted = [(topic, None, [fetch.FetchPartition(0, -1, 0, -1, -1, 1 << 20)])]
        peer.send(fetch.encode_request(12, 1, me, wanted, max_wait_ms=10_000, min_bytes=1, max_bytes=1 << 20))
        writer.produce(topic, batch_of(b"x" * 9000))
        frame = peer.frame()
        assert frame is not None
        assert fetch.decode_response(12, frame).throttle_ms > 0


def test_a_default_quota_is_for_each_client_by_itself(world: World, topic: str, me: str) -> None:
    quotas = world.client.admin.quotas
    world.set(f"{me} b", producer_byte_rate=10 * RATE)
    quotas.set(client_id=DEFAULT_ENTITY, values={"producer_byte_rate": RATE})
    try:
        with RawPeer(world.port) as a, RawPeer(world.port) as b, RawPeer(world.port) as c:
            assert write(a, f"{me} a", topic, 20_000) > 0
            assert write(b, f"{me} b", topic, 20_000) == 0, "its own quota counts, not the default"
            assert write(c, f"{me} c", topic, 1000) == 0, "the debt of one is not that of another"
    finally:
        quotas.delete(client_id=DEFAULT_ENTITY)


def test_changed_and_removed_quotas_count_at_once(world: World, topic: str, me: str) -> None:
    world.set(me, producer_byte_rate=RATE)
    with RawPeer(world.port) as peer:
        assert write(peer, me, topic, 6000) > 0
        world.set(me, producer_byte_rate=1000 * RATE)
        assert write(peer, me, topic, 6000) <= 2, "what was owed is paid at the new rate"
        world.set(me, producer_byte_rate=None)
        assert write(peer, me, topic, 500_000) == 0
    assert not [quota for quota in world.client.admin.quotas.list() if quota.client_id == me]


@pytest.mark.row("A8")
def test_quotas_survive_a_restart_and_cost_nothing_when_there_are_none(tmp_path: Path, me: str) -> None:
    with world_in(tmp_path / "data") as world:
        quotas = world.client.admin.quotas
        assert present(world.broker._broker).service.quotas.active is None
        quotas.set(client_id=me, values={"producer_byte_rate": RATE, "consumer_byte_rate": 7})
        quotas.set(user="ANONYMOUS", client_id=DEFAULT_ENTITY, values={"consumer_byte_rate": 8})
        quotas.set(client_id="größe/= ,", values={"consumer_byte_rate": 9})
        before = quotas.list()
        world.client.admin.create_topic("t")
    with world_in(tmp_path / "data") as world:
        quotas = world.client.admin.quotas
        assert quotas.list() == before
        assert Quota(None, me, {"producer_byte_rate": RATE, "consumer_byte_rate": 7}) in before
        assert Quota("ANONYMOUS", DEFAULT_ENTITY, {"consumer_byte_rate": 8}) in before
        assert Quota(None, "größe/= ,", {"consumer_byte_rate": 9}) in before
        with RawPeer(world.port) as peer:
            assert write(peer, me, "t", 20_000) > 0
        for quota in before:
            quotas.delete(user=quota.user, client_id=quota.client_id)
        assert quotas.list() == []
        assert present(world.broker._broker).service.quotas.active is None
        with pytest.raises(InvalidRequest, match="no quotas"):
            quotas.delete(client_id=me)


def test_a_stopping_broker_does_not_wait_for_those_who_pause(tmp_path: Path, me: str) -> None:
    with world_in(tmp_path / "data") as world, RawPeer(world.port) as peer:
        world.client.admin.create_topic("t")
        world.set(me, producer_byte_rate=100)
        peer.send(5 * produce_frame(me, "t", 3000))
        pause_ms = written(peer)
        begun = time.monotonic()
        world.broker.close()
        assert time.monotonic() - begun < scaled(10)
        while (
            frame := peer.frame()
        ) is not None:  # what had been read is still done, and nobody pauses again
            assert produce.decode_response(9, frame).throttle_ms == 0
    assert pause_ms == pytest.approx(31_000, abs=300)


def alter(entity: list[tuple[str, str | None]], **values: float) -> dict[str, Any]:
    return {
        "entity": [{"entity_type": kind, "entity_name": name} for kind, name in entity],
        "ops": [{"key": key, "value": value, "remove": False} for key, value in values.items()],
    }


INVALID_REQUEST = 42
UNSUPPORTED_VERSION = 35


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (alter([("client-id", "a")], request_percentage=50), "not offered"),
        (alter([("client-id", "a")], bytes_per_day=5), "no such quota"),
        (alter([("client-id", "a")], producer_byte_rate=0), "whole number"),
        (alter([("client-id", "a")], producer_byte_rate=1.5), "whole number"),
        (alter([("client-id", "a")], producer_byte_rate=float("nan")), "whole number"),
        (alter([("client-id", "a")], producer_byte_rate=float("inf")), "whole number"),
        (alter([("client-id", "")], producer_byte_rate=1), "characters"),
        (alter([("client-id", "a" * 1001)], producer_byte_rate=1), "characters"),
        (alter([("user", "")], producer_byte_rate=1), "characters"),
        (alter([("ip", "10.0.0.1")], producer_byte_rate=1), "only quota of an ip"),
        (alter([("ip", "broker.example")], connection_creation_rate=1), "not an IPv4 or IPv6 address"),
        (alter([("ip", "10.0.0.1")], connection_creation_rate=0), "whole number of connections"),
        (alter([("ip", None), ("user", None)], connection_creation_rate=1), "cannot be combined"),
        (alter([("client-id", "a")], connection_creation_rate=1), "a quota of an ip"),
        (alter([("team", "a")], producer_byte_rate=1), "user and client-id"),
        (alter([("user", None), ("user", None)], producer_byte_rate=1), "twice"),
        (alter([], producer_byte_rate=1), "needs a user"),
    ],
)
def test_what_would_not_be_enforced_is_refused_with_the_reason(
    world: World, entry: dict[str, Any], reason: str
) -> None:
    before = world.client.admin.quotas.list()
    with RawPeer(world.port) as peer:
        for validate_only in (True, False):
            fields = {"entries": [entry], "validate_only": validate_only}
            answer = peer.call(ApiKey.ALTER_CLIENT_QUOTAS, 1, fields).entries[0]
            assert (answer.error_code, reason in answer.error_message) == (INVALID_REQUEST, True), answer
    assert world.client.admin.quotas.list() == before


def test_one_bad_entry_does_not_keep_the_others_from_being_set(world: World, me: str) -> None:
    entries = [
        alter([("client-id", f"{me} 1")], producer_byte_rate=5),
        alter([("client-id", f"{me} 2")], producer_byte_rate=-5),
        alter([("client-id", f"{me} 3")], producer_byte_rate=5),
        alter([("client-id", f"{me} 3")], consumer_byte_rate=5),
    ]
    with RawPeer(world.port) as peer:
        answer = peer.call(ApiKey.ALTER_CLIENT_QUOTAS, 1, {"entries": entries, "validate_only": True})
        assert not [
            quota for quota in world.client.admin.quotas.list() if str(quota.client_id).startswith(me)
        ]
        answer = peer.call(ApiKey.ALTER_CLIENT_QUOTAS, 0, {"entries": entries})
    assert [entry.error_code for entry in answer.entries] == [0, *[INVALID_REQUEST] * 3]
    kept = [quota.client_id for quota in world.client.admin.quotas.list()]
    assert [name for name in kept if str(name).startswith(me)] == [f"{me} 1"]


ALL = ("user", "user client", "any user", "any client", "named", "address")
FILTERS = [
    ([], False, ALL),
    ([("user", 2, None)], False, ("user", "user client", "any user")),
    ([("user", 2, None)], True, ("user", "any user")),
    ([("user", 0, "ANONYMOUS")], False, ("user", "user client")),
    ([("user", 1, None)], False, ("any user",)),
    ([("client-id", 1, None)], False, ("any client",)),
    ([("client-id", 2, None)], True, ("any client", "named")),
    ([("client-id", 0, "c")], False, ("user client", "named")),
    ([("client-id", 0, "c"), ("user", 0, "ANONYMOUS")], True, ("user client",)),
    ([("ip", 2, None)], False, ("address",)),
    ([("ip", 0, "192.0.2.1")], True, ("address",)),
    ([("ip", 1, None)], False, ()),
]


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world_in(tmp_path_factory.mktemp("filters") / "data") as world:
        set_quota = world.client.admin.quotas.set
        entities: list[tuple[Any, Any]] = [
            ("ANONYMOUS", None),
            ("ANONYMOUS", "c"),
            (DEFAULT_ENTITY, None),
            (None, DEFAULT_ENTITY),
            (None, "c"),
        ]
        for number, (user, client_id) in enumerate(entities):
            set_quota(user=user, client_id=client_id, values={"consumer_byte_rate": number + 1})
        set_quota(ip="192.0.2.1", values={"connection_creation_rate": len(ALL)})
        yield world


@pytest.mark.parametrize(("components", "strict", "expected"), FILTERS)
@pytest.mark.parametrize("version", [0, 1])
def test_quota_filters_select_the_matching_entities(
    filtered: World, components: list[Any], strict: bool, expected: tuple[str, ...], version: int
) -> None:
    wanted = [{"entity_type": kind, "match_type": how, "match": name} for kind, how, name in components]
    with RawPeer(filtered.port) as peer:
        fields = {"components": wanted, "strict": strict}
        answer = peer.call(ApiKey.DESCRIBE_CLIENT_QUOTAS, version, fields)
    assert answer.error_code == 0
    assert {ALL[int(entry.values[0].value) - 1] for entry in answer.entries} == set(expected)


@pytest.mark.parametrize(
    ("components", "code"),
    [
        ([("team", 2, None)], UNSUPPORTED_VERSION),
        ([("user", 3, None)], INVALID_REQUEST),
        ([("user", 0, None)], INVALID_REQUEST),
        ([("user", 2, None), ("user", 1, None)], INVALID_REQUEST),
        ([("ip", 2, None), ("user", 1, None)], INVALID_REQUEST),
        ([("", 2, None)], INVALID_REQUEST),
    ],
)
def test_filters_that_mean_nothing_are_refused(filtered: World, components: list[Any], code: int) -> None:
    wanted = [{"entity_type": kind, "match_type": how, "match": name} for kind, how, name in components]
    with RawPeer(filtered.port) as peer:
        answer = peer.call(ApiKey.DESCRIBE_CLIENT_QUOTAS, 1, {"components": wanted, "strict": False})
    assert (answer.error_code, answer.entries) == (code, None)


def test_publish_over_http_and_sqs_above_the_quota_is_answered_after_the_throttle_time() -> None:
    with TestBroker(quota_burst_ms=BURST_MS) as broker, ThreadPoolExecutor(2) as pool:
        client = broker.client()
        client.admin.create_topic("t")
        sqs = sqs_client(broker.sqs_url)
        queue = sqs.create_queue(QueueName="queue")["QueueUrl"]
        client.admin.quotas.set(client_id=DEFAULT_ENTITY, values={"producer_byte_rate": 1_000})
        records = {"records": [{"value": "x" * 10_000}]}
        slow = [
            pool.submit(httpx.post, f"{broker.http_url}/v1/topics/t/records/batch", json=records, timeout=60),
            pool.submit(sqs.send_message, QueueUrl=queue, MessageBody="x" * 10_000),
        ]
        read = client.consume(["t", "queue"], to_end=False)
        found = [next(read), next(read)]  # both are stored, and neither is answered
        assert {each.topic for each in found} == {"t", "queue"}
        read.close()
        assert not any(each.done() for each in slow)
        broker.clock.advance(seconds=8)  # of 10 s
        assert not any(each.done() for each in slow)
        broker.clock.advance(seconds=3)
        assert slow[0].result(scaled(20)).status_code == 200
        assert slow[1].result(scaled(20))["MessageId"]


@pytest.mark.full
def test_publish_over_grpc_above_the_quota_is_answered_before_its_deadline() -> None:
    with TestBroker(quota_burst_ms=BURST_MS) as broker, grpc.insecure_channel(broker.grpc_address) as channel:
        client = broker.client()
        client.admin.create_topic("t")
        client.admin.quotas.set(client_id=DEFAULT_ENTITY, values={"producer_byte_rate": 1_000})
        publish = channel.unary_unary(
            "/mansio.v1.Mansio/Publish", pb.PublishRequest.SerializeToString, pb.PublishResponse.FromString
        )
        request = pb.PublishRequest(topic="t", records=[pb.NewRecord(value=b"x" * 10_000)])
        begin = time.monotonic()
        for _ in range(3):  # 10 s each
            assert not publish(request, timeout=scaled(3)).ranges[0].HasField("error")
        assert time.monotonic() - begin > 2
