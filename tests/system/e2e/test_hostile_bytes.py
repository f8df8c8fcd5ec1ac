"""Malformed and dishonest requests: the response is a typed error or the connection is closed, with one log line and
bounded memory, and another client is not affected."""

from __future__ import annotations

import random
import ssl
import struct
import time
from typing import TYPE_CHECKING

import pytest
from crc32c import crc32c

from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.apis import produce
from mansio.wire.codec import messages
from mansio.wire.headers import request_header
from support.process import ServedBroker, served
from support.raw_peer import RawPeer, batch_of, fetch_frame, length_prefixed, produce_frame
from support.waiting import wait_until
from system.e2e.other_client import MIB, Watched, wait_until_idle, watched

if TYPE_CHECKING:
    from collections.abc import Iterator

CORRUPT_MESSAGE = 2
UNKNOWN_TOPIC_OR_PARTITION = 3
MESSAGE_TOO_LARGE = 10
INVALID_REQUIRED_ACKS = 21
UNSUPPORTED_VERSION = 35
INVALID_REQUEST = 42
UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
UNSUPPORTED_COMPRESSION_TYPE = 76
INVALID_RECORD = 87
REFUSED = {CORRUPT_MESSAGE, INVALID_RECORD, UNSUPPORTED_FOR_MESSAGE_FORMAT, UNSUPPORTED_COMPRESSION_TYPE}

GROWTH_BYTES_MAX = 16 * MIB
"""What a lie about a length or a count may cost at most; the lies announce gigabytes."""

HUGE_COUNT = 0x7FFF_FFFF
COMPACT_HUGE_COUNT = b"\xff\xff\xff\xff\x07"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    with served(tmp_path_factory.mktemp("hostile") / "data", http=False) as running:
        with RawPeer(running.kafka_port) as peer:
            peer.create_topic("target", 2)
        wait_until_idle(running)
        yield running


@pytest.fixture
def view(broker: ServedBroker) -> Iterator[Watched]:
    with watched(broker) as found:
        yield found


def tls_client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        hello.do_handshake()
    return outgoing.read()


def garbage(seed: int) -> bytes:
    return random.Random(seed).randbytes(4096)


def header(api_key: int, version: int) -> bytes:
    return request_header(api_key, version, 7, "hostile")


NOT_THE_PROTOCOL = {
    "tls client hello": tls_client_hello(),
    "http get": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "http post": b"POST /topics HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
    "ssh banner": b"SSH-2.0-OpenSSH_9.6\r\n",
    "redis ping": b"*1\r\n$4\r\nPING\r\n",
    "length of 2 GB": struct.pack(">i", HUGE_COUNT) + b"x" * 100,
    "negative length": struct.pack(">i", -1) + b"x" * 100,
    "most negative length": struct.pack(">i", -(1 << 31)) + b"x" * 100,
    "empty frame": length_prefixed(b""),
    "frame shorter than a header": length_prefixed(b"\0\3\0\1"),
    "frame of zeros": length_prefixed(b"\0" * 64),
    "client id longer than the frame": length_prefixed(struct.pack(">hhih", 3, 1, 7, 32767) + b"short"),
    "client id of negative length": length_prefixed(struct.pack(">hhih", 3, 1, 7, -7)),
    "client id not utf-8": length_prefixed(struct.pack(">hhih", 3, 1, 7, 2) + b"\xff\xfe" + b"\0" * 4),
    "header tags longer than the frame": length_prefixed(
        struct.pack(">hhih", 3, 9, 7, -1) + b"\x01\x00" + COMPACT_HUGE_COUNT
    ),
    "unknown api": length_prefixed(header(999, 0)),
    "negative api": length_prefixed(header(-1, 0)),
    "version from the future": length_prefixed(header(ApiKey.METADATA, 99)),
    "version from the past": length_prefixed(header(ApiKey.FETCH, 0)),
    "negative version": length_prefixed(header(ApiKey.METADATA, -1)),
    "body cut short": length_prefixed(header(ApiKey.METADATA, 9) + b"\x02"),
    "string not utf-8": length_prefixed(header(ApiKey.METADATA, 1) + b"\0\0\0\1\0\2\xff\xfe"),
    "produce cut short": produce_frame([("target", None, [(0, batch_of(b"x"))])])[:40].ljust(60, b"\xff"),
}


@pytest.mark.row("P5")
@pytest.mark.parametrize("threat", NOT_THE_PROTOCOL)
def test_what_is_not_the_protocol_ends_its_own_connection(view: Watched, threat: str) -> None:
    end_own_connection(view, NOT_THE_PROTOCOL[threat])
    view.neighbour.wait_for_rounds()
    assert view.memory.growth < GROWTH_BYTES_MAX


def test_each_of_them_is_logged_and_no_flood_of_them_floods_the_log(view: Watched) -> None:
    """Lines a peer can cause at will come once a second, and say how many were held back."""
    begun = time.monotonic()
    for threat in 3 * list(NOT_THE_PROTOCOL.values()):
        end_own_connection(view, threat)

    def reported() -> int:
        lines = [line for line in view.lines if "connection_closed" in line]
        assert all("peer=127.0.0.1" in line and len(line) < 400 for line in lines), lines
        return sum(1 + int(line.rpartition("held_back=")[2]) if "held_back=" in line else 1 for line in lines)

    wait_until(lambda: reported() >= 3 * len(NOT_THE_PROTOCOL), 20, "all are told of")
    assert len(view.lines) <= 10 + time.monotonic() - begun, view.lines


def end_own_connection(view: Watched, threat: bytes) -> None:
    with RawPeer(view.port) as peer:
        peer.send(threat)
        if threat is NOT_THE_PROTOCOL["produce cut short"]:
            peer.send(b"\xff" * 200)
        assert peer.closed(15.0)


@pytest.mark.parametrize("seed", range(5))
def test_random_bytes_in_a_sound_frame_end_their_own_connection(view: Watched, seed: int) -> None:
    chance = random.Random(seed)
    closed = 0
    for _ in range(40):
        api = chance.choice(list(SUPPORTED_APIS.values()))
        version = chance.randint(api.min_version, api.max_version)
        with RawPeer(view.port) as peer:
            peer.send(length_prefixed(header(api.key, version) + chance.randbytes(chance.randint(0, 200))))
            # Some garbage happens to be a request; then there is an answer, and not nothing for ever.
            closed += peer.frame(10.0) is None
    assert closed > 20
    assert len(view.lines) <= 40
    assert view.memory.growth < 3 * GROWTH_BYTES_MAX, "schemas of all APIs are imported meanwhile"


def counts_larger_than_the_frame() -> dict[str, bytes]:
    """Requests whose first array, or an array in it, announces two thousand million entries."""
    huge = struct.pack(">i", HUGE_COUNT)
    text = b"\0\6target"
    flexible = {
        f"{api.key.name} {api.max_version}": header(api.key, api.max_version) + COMPACT_HUGE_COUNT * 4
        for api in SUPPORTED_APIS.values()
        if api.key != ApiKey.API_VERSIONS
    }
    return flexible | {
        "topics of METADATA 1": header(ApiKey.METADATA, 1) + huge,
        "topics of PRODUCE 3": header(ApiKey.PRODUCE, 3) + struct.pack(">hhi", -1, -1, 1000) + huge,
        "partitions of PRODUCE 3": header(ApiKey.PRODUCE, 3)
        + struct.pack(">hhii", -1, -1, 1000, 1)
        + text
        + huge,
        "records of PRODUCE 3": header(ApiKey.PRODUCE, 3)
        + struct.pack(">hhii", -1, -1, 1000, 1)
        + text
        + struct.pack(">iii", 1, 0, HUGE_COUNT),
        "topics of FETCH 4": header(ApiKey.FETCH, 4) + struct.pack(">iiiib", -1, 0, 1, 1 << 20, 0) + huge,
        "topics of LIST_OFFSETS 1": header(ApiKey.LIST_OFFSETS, 1) + struct.pack(">i", -1) + huge,
        "protocols of JOIN_GROUP 0": header(ApiKey.JOIN_GROUP, 0)
        + b"\0\1g"
        + struct.pack(">i", 10_000)
        + b"\0\0"
        + b"\0\10consumer"
        + huge,
        "topics of CREATE_TOPICS 2": header(ApiKey.CREATE_TOPICS, 2) + huge,
        "negative count of METADATA 1": header(ApiKey.METADATA, 1) + struct.pack(">i", -2),
    }


@pytest.mark.row("P5")
def test_counts_larger_than_the_frame_cost_no_memory(view: Watched) -> None:
    for threat, request in counts_larger_than_the_frame().items():
        with RawPeer(view.port) as peer:
            peer.send(length_prefixed(request))
            assert peer.closed(15.0), threat
        assert view.memory.growth < GROWTH_BYTES_MAX, threat


@pytest.mark.row("A1")
def test_api_versions_from_the_future_is_answered_in_version_0(view: Watched) -> None:
    with RawPeer(view.port) as peer:
        peer.send(length_prefixed(header(ApiKey.API_VERSIONS, 77) + b"whatever"))
        answer = peer.frame()
        assert answer is not None
        _, response = messages.decode_response_frame(ApiKey.API_VERSIONS, 0, answer)
        assert response.error_code == UNSUPPORTED_VERSION
        assert {one.api_key for one in response.api_keys} == {
            int(api.key) for api in SUPPORTED_APIS.values() if api.is_advertised
        }
        assert peer.call(ApiKey.API_VERSIONS, 3).error_code == 0, "the connection goes on"


@pytest.mark.row("A1")
def test_bytes_after_a_request_are_passed_over_as_kafka_does(view: Watched) -> None:
    """librdkafka 2.x asks for all topics with three bytes too many."""
    with RawPeer(view.port) as peer:
        peer.send(length_prefixed(header(ApiKey.METADATA, 13) + bytes.fromhex("00000000010000")))
        answer = peer.frame()
        assert answer is not None
        _, response = messages.decode_response_frame(ApiKey.METADATA, 13, answer)
        assert "target" in {one.name for one in response.topics}


@pytest.mark.row("A1")
def test_old_produce_versions_are_announced_and_refused(view: Watched) -> None:
    with RawPeer(view.port) as peer:
        announced = {one.api_key: one.min_version for one in peer.call(ApiKey.API_VERSIONS, 0).api_keys}
        assert announced[ApiKey.PRODUCE] == 0
        peer.send(length_prefixed(header(ApiKey.PRODUCE, 2) + struct.pack(">hii", -1, 1000, 0)))
        assert peer.closed(15.0)


def spoiled_batches() -> dict[str, bytes]:
    """Sound batches, each with one thing wrong."""
    good = batch_of(b"value one", b"value two")

    def patched(position: int, layout: str, value: int) -> bytes:
        spoiled = bytearray(good)
        struct.pack_into(layout, spoiled, position, value)
        return bytes(spoiled)

    return {
        "wrong crc": patched(17, ">I", 0xDEADBEEF),
        "flipped bit in a value": good[:-3] + bytes((good[-3] ^ 1,)) + good[-2:],
        "cut in the records": good[:-5],
        "cut in the header": good[:40],
        "one byte": good[:1],
        "bytes after it": good + b"\0\0\0",
        "length too large": patched(8, ">i", len(good) + 100),
        "length negative": patched(8, ">i", -5),
        "length of a lying giant": patched(8, ">i", HUGE_COUNT),
        "format 1": patched(16, ">b", 1),
        "format 9": patched(16, ">b", 9),
        "count below the truth": _with_crc(patched(57, ">i", 1)),
        "count above the truth": _with_crc(patched(57, ">i", HUGE_COUNT)),
        "count negative": _with_crc(patched(57, ">i", -1)),
        "last offset delta wrong": _with_crc(patched(23, ">i", 99)),
        "unknown codec": _with_crc(patched(21, ">h", 7)),
    }


def _with_crc(batch: bytes) -> bytes:
    return batch[:17] + struct.pack(">I", crc32c(batch[21:])) + batch[21:]


@pytest.mark.row("P5", "L2")
@pytest.mark.parametrize("threat", sorted(spoiled_batches()))
def test_spoiled_batch_is_refused_and_the_one_beside_it_is_kept(view: Watched, threat: str) -> None:
    with RawPeer(view.port) as peer:
        before = peer.end_offset("target", 0), peer.end_offset("target", 1)
        topics = [("target", None, [(0, spoiled_batches()[threat]), (1, batch_of(b"good"))])]
        peer.send(produce_frame(topics))
        answer = peer.frame()
        assert answer is not None
        bad, good = produce.decode_response(9, answer).topics[0][2]
        assert bad.error_code in REFUSED, bad
        assert (good.error_code, good.base_offset) == (0, before[1]), good
        assert (peer.end_offset("target", 0), peer.end_offset("target", 1)) == (before[0], before[1] + 1)
    assert view.memory.growth < GROWTH_BYTES_MAX


@pytest.mark.row("P5")
@pytest.mark.parametrize(
    ("topic", "partition", "acks", "code"),
    [
        ("nobody-made-this", 0, -1, UNKNOWN_TOPIC_OR_PARTITION),
        ("target", 99, -1, UNKNOWN_TOPIC_OR_PARTITION),
        ("target", -1, -1, UNKNOWN_TOPIC_OR_PARTITION),
        ("target", 0, 7, INVALID_REQUIRED_ACKS),
    ],
)
def test_produce_to_the_wrong_place_or_way_gets_its_typed_error(
    view: Watched, topic: str, partition: int, acks: int, code: int
) -> None:
    with RawPeer(view.port) as peer:
        assert peer.produce(topic, batch_of(b"x"), partition=partition, acks=acks).error_code == code
        assert peer.call(ApiKey.API_VERSIONS, 3).error_code == 0, "the connection goes on"


@pytest.mark.row("P5")
def test_batch_above_max_message_bytes_is_refused_and_one_just_below_is_kept(view: Watched) -> None:
    with RawPeer(view.port) as peer:
        peer.create_topic("narrow", max_message_bytes="1000")
        fitting = batch_of(b"x" * 900)
        fitting = batch_of(b"x" * (900 + 1000 - len(fitting)))
        assert len(fitting) == 1000
        assert peer.produce("narrow", fitting).error_code == 0
        assert peer.produce("narrow", batch_of(b"x" * 932)).error_code == MESSAGE_TOO_LARGE
        assert peer.end_offset("narrow") == 1


@pytest.mark.row("P5")
def test_produce_without_records_is_refused_and_harms_nothing(view: Watched) -> None:
    with RawPeer(view.port) as peer:
        for nothing in (None, b""):
            assert peer.produce("target", nothing).error_code in REFUSED | {INVALID_REQUEST}
        assert peer.call(ApiKey.API_VERSIONS, 3).error_code == 0


def test_frames_byte_by_byte_are_understood(view: Watched) -> None:
    with RawPeer(view.port) as peer:
        peer.create_topic("dribbled")
        for byte in produce_frame([("dribbled", None, [(0, batch_of(b"slow"))])]) + fetch_frame(
            "dribbled", number=2
        ):
            peer.send(bytes((byte,)))
        assert peer.frame() is not None
        found = peer.frame()
        assert found is not None
        assert b"slow" in found
    # Lines about connections may be of those that ended before: they are held back for a second.
    assert [line for line in view.lines if " INFO " not in line and "connection_closed" not in line] == []
