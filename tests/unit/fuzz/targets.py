"""What is fuzzed: every decoder of bytes that another party may have written, with a corpus of sound inputs for each.

A target takes any bytes and returns, or raises only what is a defect: the errors a decoder promises are caught here.
The same table feeds `make quick` (a fixed number of mutated inputs, and every input that ever failed) and `make
nightly` (Atheris, guided by coverage).
"""

from __future__ import annotations

import struct
import zlib
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from crc32c import crc32c

from mansio.api.kafka.connections.limits import ServerCounters
from mansio.api.kafka.connections.pending_response import PendingResponse
from mansio.api.kafka.server.sasl_gate import Authentication, SaslGate, SaslSettings
from mansio.broker.coordinator.checkpoint import decode_checkpoint, encode_checkpoint
from mansio.client.consumer.batch_decoder import decode_fetch
from mansio.client.consumer.fetcher import CompletedFetch, PartitionState
from mansio.client.types import TopicPartition
from mansio.config.security import SASL_MECHANISMS
from mansio.errors import (
    UNREADABLE_OR_DAMAGED,
    CorruptLog,
    CorruptMessage,
    InvalidRecord,
    StorageError,
    WireError,
)
from mansio.metadata import metadata_store
from mansio.state.authentication.bearer_tokens import (
    InvalidKeys,
    KeySet,
    TokenRules,
    parse_keys,
    verify_token,
)
from mansio.state.authentication.certificate_names import (
    InvalidSubject,
    MappingRules,
    print_subject,
    user_of_certificate,
)
from mansio.state.authentication.credentials import ScramMechanism
from mansio.state.authentication.oauth_bearer import OAuthBearerServer, bearer_message
from mansio.state.authentication.outcomes import Accepted, Challenge, Refused, Rejected
from mansio.state.authentication.plain import PasswordCheck
from mansio.state.authentication.sasl_session import (
    BROKER_HANDSHAKE,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    Closing,
    Decision,
    Gate,
    SaslSession,
)
from mansio.state.authentication.scram import ScramServer
from mansio.storage import compaction_state, index, leader_epochs, segment_timestamps
from mansio.storage.checkpoint import Checkpoint, load_checkpoint
from mansio.storage.checksummed_file import decode_checksummed, encode_checksummed
from mansio.testing.disk import SimulatedDisk
from mansio.wire.api_versions import ApiKey, is_supported
from mansio.wire.apis import fetch, produce, share_acknowledge, share_fetch
from mansio.wire.apis.mansio_apis import is_mansio_api
from mansio.wire.apis.produce import build_template, match_template
from mansio.wire.batch import record_batch, record_reader
from mansio.wire.batch.compression import Codec, decompress
from mansio.wire.codec import messages
from mansio.wire.codec.messages import REQUEST, RESPONSE, encode_request
from mansio.wire.framing import FrameReader, new_scratch_buffer
from mansio.wire.headers import read_request_header, request_header, response_header
from mansio.wire.internal_records import consumer_protocol, offset_and_group_records
from support import tokens
from support.certificate_subjects import element, random_subject
from support.credentials import NONCE, ScramPeer, credential, directory
from unit.fuzz.mutations import framed
from unit.wire.kio_oracle import every_version, kio_bytes, random_message

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from mansio.api.kafka.connections.pending_response import QueuedResponse
    from mansio.broker.routing.caller import ClientSession
    from mansio.errors import MansioError

MAX_FRAME_BYTES = 4096
MAX_OUTPUT_BYTES = 64 * 1024
SCRATCH = new_scratch_buffer()
NAME = "/d/file"


def small_message(random: Random, api_key: int, version: int, direction: str) -> bytes:
    entity = messages._schema(api_key, version, direction)
    return min((written(random, api_key, version, direction, entity) for _ in range(4)), key=len)[:400]


def written(random: Random, api_key: int, version: int, direction: str, entity: Any) -> bytes:
    fields = random_message(random, entity)
    if not is_mansio_api(api_key):
        return kio_bytes(entity, fields)
    out = bytearray()
    messages._writer(api_key, version, direction)(out, fields)
    return bytes(out)


# Requests


def decode_frame(frame: memoryview) -> None:
    """What a server does with one frame."""
    header = read_request_header(frame)
    if not is_supported(header.api_key, header.api_version):
        return
    if header.api_key == ApiKey.PRODUCE:
        request = produce.decode_request(header.api_version, frame, header.body_position)
        for _, _, partitions in request.topics:
            for _, data in partitions:
                if data is not None:
                    decompress_batch(data)
        pattern = build_template(header, frame, request)
        assert pattern is None or match_template(pattern, frame) is not None
    elif header.api_key == ApiKey.FETCH:
        fetch.decode_request(header.api_version, frame, header.body_position)
    elif header.api_key == ApiKey.SHARE_FETCH:
        share_fetch.decode_request(header.api_version, frame, header.body_position)
    elif header.api_key == ApiKey.SHARE_ACKNOWLEDGE:
        share_acknowledge.decode_request(header.api_version, frame, header.body_position)
    else:
        messages.decode_request(header.api_key, header.api_version, frame[header.body_position :])


def feed_stream(data: bytes) -> None:
    """A connection's bytes: cut into frames, in one read and in reads of three bytes, then decoded."""
    with suppress(WireError):
        assert cut(data, len(data) or 1) == cut(data, 3)
    with suppress(WireError):
        decode_frame(memoryview(data))


def cut(data: bytes, step: int) -> list[bytes]:
    reader = FrameReader(MAX_FRAME_BYTES, SCRATCH)
    frames: list[bytes] = []
    position = 0
    while position < len(data):
        room = reader.get_buffer()
        piece = data[position : position + min(step, len(room))]
        room[: len(piece)] = piece
        position += len(piece)
        frames += map(bytes, reader.buffer_updated(len(piece)))
    return frames


def request_corpus(random: Random) -> list[bytes]:
    """A request of every API and version, without its length."""
    corpus = []
    for api_key, version, direction in every_version(native=True):
        if direction == REQUEST:
            for client_id in (None, "client"):
                header = request_header(api_key, version, 1, client_id)
                corpus.append(header + small_message(random, api_key, version, direction))
    for version in (3, 8, 9, 12):
        for batch in batch_corpus(random):
            pieces = produce.encode_request(version, 1, "c", -1, 100, [("t", None, [(0, batch)])])
            corpus.append(b"".join(pieces)[4:])
    return corpus


def stream_corpus(random: Random) -> list[bytes]:
    corpus = request_corpus(random)
    return corpus + [framed(one) + framed(random.choice(corpus)) for one in corpus[::7]]


# Record batches


def decompress_batch(data: bytes | memoryview) -> None:
    try:
        header = record_batch.check_batch(data)
        assert len(record_reader.read_records(data, output_bytes_max=MAX_OUTPUT_BYTES)) == header.record_count
    except UNREADABLE_OR_DAMAGED:
        pass


def right_checksum(data: bytes) -> bytes:
    if len(data) < record_batch.HEADER_BYTES:
        return data
    sound = bytearray(data)
    struct.pack_into(">i", sound, 8, len(sound) - 12)
    struct.pack_into(">I", sound, 17, crc32c(bytes(sound[21:])))
    return bytes(sound)


def feed_batch(data: bytes) -> None:
    """As it is, and with its length and checksum put right, so that what is inside is looked at too."""
    for batch in (data, right_checksum(data)):
        decompress_batch(batch)
        with suppress(*UNREADABLE_OR_DAMAGED):
            record_batch.check_stored_batch(batch)
        with suppress(*UNREADABLE_OR_DAMAGED):
            for position, header in record_batch.iterate_batches(batch):
                one = batch[position : position + header.size]
                record_reader.read_records(one, output_bytes_max=MAX_OUTPUT_BYTES)


def feed_compressed(data: bytes) -> None:
    """The first byte is the codec."""
    if data:
        with suppress(*UNREADABLE_OR_DAMAGED):
            assert len(decompress(data[0] % 6, data[1:], MAX_OUTPUT_BYTES)) <= MAX_OUTPUT_BYTES


def feed_client_batches(data: bytes) -> None:
    """What a broker answered to our consumer."""
    with suppress(*UNREADABLE_OR_DAMAGED):
        state = PartitionState(TopicPartition("topic", 0), 0)
        for _ in decode_fetch(
            CompletedFetch(state, 0, memoryview(right_checksum(data)), []), True, MAX_OUTPUT_BYTES
        ):
            pass


def batch_corpus(random: Random) -> list[bytes]:
    rows = [
        (1000 + n, b"key%d" % n, random.choice((None, b"", b"value" * n)), [("h", None)] * (n % 2))
        for n in range(6)
    ]
    return [record_batch.build_batch(rows, codec=codec) for codec in Codec]


def compressed_corpus(random: Random) -> list[bytes]:
    return [bytes([one[22] & 7]) + one[61:] for one in batch_corpus(random)]


# Responses, and what consumers tell each other

RESPONSES = [
    (key, version) for key, version, direction in every_version(native=True) if direction == RESPONSE
]


def feed_response(data: bytes) -> None:
    """The first two bytes choose the API and version."""
    if len(data) < 2:
        return
    key, version = RESPONSES[int.from_bytes(data[:2]) % len(RESPONSES)]
    answer = data[2:]
    with suppress(WireError):
        if key == ApiKey.PRODUCE:
            produce.decode_response(version, answer)
        elif key == ApiKey.FETCH:
            fetch.decode_response(version, answer)
        elif key == ApiKey.SHARE_FETCH:
            share_fetch.decode_response(version, answer)
        elif key == ApiKey.SHARE_ACKNOWLEDGE:
            share_acknowledge.decode_response(version, answer)
        else:
            messages.decode_response_frame(key, version, answer)


def response_corpus(random: Random) -> list[bytes]:
    return [
        number.to_bytes(2) + response_header(key, version, 1) + small_message(random, key, version, RESPONSE)
        for number, (key, version) in enumerate(RESPONSES)
    ]


def feed_consumer_protocol(data: bytes) -> None:
    with suppress(WireError):
        found = consumer_protocol.decode_subscription(data)
        assert consumer_protocol.decode_subscribed_topics(data) == found.topics
    with suppress(WireError):
        consumer_protocol.decode_assignment(data)


def consumer_protocol_corpus(_random: Random) -> list[bytes]:
    partitions = (("a", 0), ("a", 1), ("größe", 7))
    owned = tuple(map(TopicPartition._make, partitions))
    assigned = consumer_protocol.Assignment(partitions=owned, user_data=b"u")
    subscribed = consumer_protocol.Subscription(topics=("a", "b"), user_data=b"u", owned_partitions=owned)
    return [
        consumer_protocol.encode_subscription(subscribed),
        *(consumer_protocol.encode_assignment(assigned, version=version) for version in range(4)),
    ]


# Files


def feed_file(data: bytes) -> None:
    """Each small file of a log, with these bytes, and with these bytes under a right checksum. A damaged file is None
    to its reader, or a typed error."""
    decode_checksummed(index.INDEX_MAGIC, index.INDEX_VERSION, data)
    for content, load in (
        (
            encode_checksummed(index.INDEX_MAGIC, index.INDEX_VERSION, data),
            lambda disk: index.load_index(disk, NAME, 0),
        ),
        (
            encode_checksummed(leader_epochs.EPOCHS_MAGIC, leader_epochs.EPOCHS_VERSION, data),
            lambda disk: leader_epochs.load_leader_epochs(disk, NAME),
        ),
        (
            encode_checksummed(
                segment_timestamps.TIMESTAMPS_MAGIC, segment_timestamps.TIMESTAMPS_VERSION, data
            ),
            lambda disk: segment_timestamps.load_segment_timestamps(disk, NAME),
        ),
        (data, lambda disk: load_checkpoint(disk, NAME)),
    ):
        for written in (content, data):
            disk = SimulatedDisk()
            disk.make_directory("/d")
            disk.put_file(NAME, written)
            with suppress(StorageError):
                load(disk)
    disk = SimulatedDisk()
    disk.make_directory("/d")
    path = f"/d/{compaction_state.COMPACTION_NAME}"
    disk.put_file(
        path, encode_checksummed(compaction_state.COMPACTION_MAGIC, compaction_state.COMPACTION_VERSION, data)
    )
    with suppress(StorageError):
        compaction_state.load_state(disk, "/d")


def file_corpus(_random: Random) -> list[bytes]:
    sealed = [
        index.SparseIndex(4096).encode(0, 10, 4000),
        leader_epochs.LeaderEpochCache([(0, 0), (3, 100)]).encode(),
        segment_timestamps.encode_segment_timestamps(
            [segment_timestamps.SegmentTimestamp(0, 100, 5), segment_timestamps.SegmentTimestamp(9, 100, 6)]
        ),
        compaction_state.CompactionState(5, 5, 9, compaction_state.PendingSwap(0, 5, 100)).encode(),
    ]
    return [*sealed, *(one[10:-4] for one in sealed), Checkpoint(1, 10, 0, 400, 0).encode()]


def feed_view_checkpoint(data: bytes) -> None:
    for written in (data, data[:-4] + struct.pack(">I", zlib.crc32(data[:-4]))):
        with suppress(CorruptLog):
            decode_checkpoint(written)


def view_checkpoint_corpus(_random: Random) -> list[bytes]:
    return [
        encode_checkpoint(0, []),
        encode_checkpoint(77, [(b"key", b"value"), (b"", b""), (b"k" * 50, b"v" * 90)]),
    ]


def feed_group_record(data: bytes) -> None:
    for decode in (
        offset_and_group_records.decode_key,
        offset_and_group_records.decode_offset_value,
        offset_and_group_records.decode_group_value,
    ):
        with suppress(CorruptMessage, InvalidRecord, WireError, StorageError):
            decode(data)


def group_record_corpus(_random: Random) -> list[bytes]:
    return [
        offset_and_group_records.encode_group_key(offset_and_group_records.GroupKey("group")),
        offset_and_group_records.encode_offset_key(offset_and_group_records.OffsetKey("group", "topic", 3)),
        offset_and_group_records.encode_offset_value(
            offset_and_group_records.CommittedOffset(5, 1, "note", 1000)
        ),
        bytes.fromhex("00030008636f6e73756d6572000000050005726f756e640003666f6f00000000000003e800000000"),
    ]


def feed_metadata_value(data: bytes) -> None:
    with suppress(StorageError):
        metadata_store.decode("/mansio/topics/name", data)


def metadata_corpus(_random: Random) -> list[bytes]:
    topic = {"uuid": "0" * 32, "partitions": 3, "configs": {"retention.ms": "5"}, "state": "live"}
    return [metadata_store.encode(topic, "writer"), b"{}", b"[]", b'{"schema":1}']


# Authentication

USERS = directory(alice=credential("correct horse"))
RULES = MappingRules(r"RULE:^CN=((?:\\.|[^,])*?),OU=(.*?)$/$1@$2/L, RULE:(.*)C=(..)(.*)/$2$1/, DEFAULT")


def feed_sasl(data: bytes) -> None:
    """The first byte chooses the mechanism; tokens follow, each behind its length in two bytes. What follows a failure
    is fed, too, and must be refused."""
    session = SaslSession(SASL_MECHANISMS, USERS, lambda: NONCE, 60_000)
    assert session.gate(SASL_HANDSHAKE, 1, 0) is Gate.HANDSHAKE
    session.handshake(1, SASL_MECHANISMS[data[0] % len(SASL_MECHANISMS)] if data else "", 0)
    position, is_closed = 1, not data
    while position < len(data):
        start = position + 2
        position = start + int.from_bytes(data[position:start])
        gate = session.gate(SASL_AUTHENTICATE, 2, 0)
        assert not is_closed or isinstance(gate, Decision)
        if isinstance(gate, Decision):
            continue
        outcome = session.authenticate(data[start:position], 0)
        if isinstance(outcome, PasswordCheck):
            outcome = session.complete(outcome.run(0), 0)
        assert not isinstance(outcome, Refused)
        is_closed = outcome.closing is not Closing.NEVER
    assert session.user is None or session.user.name == "alice"
    assert (session.gate(ApiKey.METADATA, 12, 0) is Gate.SERVE) == session.is_authenticated


def sasl_corpus(_random: Random) -> list[bytes]:
    """A log-in that succeeds, and one that fails, with each mechanism."""
    found = []
    for number, mechanism in enumerate(SASL_MECHANISMS):
        for password in ("correct horse", "wrong"):
            tokens = [b"\0alice\0" + password.encode()]
            if mechanism != "PLAIN":
                peer = ScramPeer("alice", password, ScramMechanism(mechanism))
                tokens = [peer.first()]
                server = ScramServer(ScramMechanism(mechanism), USERS, NONCE)
                challenge = server.step(tokens[0], 0)
                assert isinstance(challenge, Challenge)
                tokens.append(peer.final(challenge.token))
            found.append(bytes([number]) + b"".join(len(token).to_bytes(2) + token for token in tokens))
    return found


class GateWorld:
    """Server and connection of a gate. `served`: the keys of the requests that it let pass."""

    client_host, peer, is_confidential, closed, cluster = "10.0.0.1", None, True, False, None

    def __init__(self) -> None:
        self.counters = ServerCounters()
        self.service = self.clock = self.loop = self.users = self.passwords = self
        self.directory = USERS
        self.user = ""
        self.served: list[int] = []

    def wall_ms(self) -> int:
        return 0

    def monotonic(self) -> float:
        return 0.0

    def call_later(self, _delay_s: float, callback: Callable[[], None]) -> None:
        callback()

    def begin(self, first: Any, second: Any, *more: Any) -> Any:
        """Check a password, or serve a request."""
        if isinstance(first, PasswordCheck):
            return first.run(0)
        key = int.from_bytes(second[:2])
        assert self.user or key in {ApiKey.API_VERSIONS, *BROKER_HANDSHAKE}, key
        assert not self.closed
        return ()

    def admit(self, session: ClientSession, *, is_endless: bool) -> None:
        assert not is_endless
        self.user = session.user

    def defer_response(self) -> PendingResponse:
        return PendingResponse(self)

    def on_response_complete(self, response: QueuedResponse) -> None: ...

    def pause_reading_ms(self, duration_ms: int) -> None: ...

    def reject(self, error: MansioError) -> None:
        raise error

    def abort(self) -> None:
        self.closed = True

    close_after_response = abort


def feed_gate(data: bytes) -> None:
    """Frames behind their lengths in two bytes, on a connection that has to authenticate."""
    world: Any = GateWorld()
    settings = SaslSettings(SASL_MECHANISMS, lambda _: NONCE, "SASL", 60_000, 0, 1 << 16, 30_000)
    gate = SaslGate(Authentication(world), settings)
    gate.on_connected(world)
    position = 0
    while position < len(data) and not world.closed:
        start = position + 2
        position = start + int.from_bytes(data[position:start])
        with suppress(WireError):
            gate.begin(world, memoryview(data[start:position]))
    assert world.user in ("", "alice")


def gate_corpus(_random: Random) -> list[bytes]:
    """Dialogues with each mechanism, a right and a wrong password, and requests before and after."""
    found = []
    versions = encode_request(ApiKey.API_VERSIONS, 0, 1, "x", {})
    cluster = encode_request(ApiKey.DESCRIBE_CLUSTER, 0, 4, "x", {})
    for data in sasl_corpus(_random):
        mechanism, position = SASL_MECHANISMS[data[0]], 1
        frames = [versions, encode_request(ApiKey.SASL_HANDSHAKE, 1, 2, "x", {"mechanism": mechanism})]
        while position < len(data):
            start = position + 2
            position = start + int.from_bytes(data[position:start])
            frames.append(
                encode_request(ApiKey.SASL_AUTHENTICATE, 2, 3, "x", {"auth_bytes": data[start:position]})
            )
        found.append(b"".join((len(one) - 4).to_bytes(2) + one[4:] for one in [*frames, cluster, *frames]))
    return found


def feed_certificate(data: bytes) -> None:
    """As a certificate, and as the subject of one. Different bytes may be the same name, but none is empty."""
    with suppress(InvalidSubject):
        assert user_of_certificate(data, RULES)
    with suppress(InvalidSubject):
        print_subject(data)


def certificate_corpus(random: Random) -> list[bytes]:
    subjects = [random_subject(random) for _ in range(30)]
    field, version = element(0x02, b"1"), element(0xA0, element(0x02, b"2"))
    signed = [element(0x30, version * (n % 2) + field * 4 + one) for n, one in enumerate(subjects)]
    return [*subjects, *(element(0x30, one + field) for one in signed)]


# Tokens

TOKEN_NOW_MS: Final = 1_700_000_000_000
TOKEN_RULES: Final = TokenRules(tokens.ISSUER, frozenset({tokens.AUDIENCE}), groups_claim="groups")


@cache
def token_issuer() -> tokens.Issuer:
    return tokens.Issuer()


@cache
def token_keys() -> KeySet:
    return parse_keys(token_issuer().jwks())


@cache
def valid_token(key_id: str, algorithm: str) -> str:
    body = tokens.claims(TOKEN_NOW_MS // 1000, groups=["a"])
    return token_issuer().sign(body, key_id=key_id, algorithm=algorithm)


def feed_token(data: bytes) -> None:
    """After a byte, a message of OAUTHBEARER or a document with keys. A token is accepted only if it is a valid one."""
    if not data or data[0] % 2:
        with suppress(InvalidKeys):
            parse_keys(data[1:])
        return

    def verify(token: str, now_ms: int) -> Accepted | Rejected:
        outcome = verify_token(token, token_keys(), TOKEN_RULES, now_ms)
        if not isinstance(outcome, Accepted):
            return Rejected("not valid")
        # Signatures of ECDSA can be altered into others that are valid; what is signed cannot.
        signed = {valid_token(*each).rpartition(".")[0] for each in TOKEN_KINDS}
        assert token.rpartition(".")[0] in signed
        return outcome

    OAuthBearerServer(verify).step(data[1:], TOKEN_NOW_MS)


TOKEN_KINDS: Final = ((tokens.KEY_ID, "RS256"), ("ec-1", "ES256"), ("ed-1", "EdDSA"))


def token_corpus(_: Random) -> list[bytes]:
    valid = [b"\0" + bearer_message(valid_token(*each)) for each in TOKEN_KINDS]
    return [*valid, b"\1" + token_issuer().jwks()]


class Target(NamedTuple):
    """`feed` takes any bytes; `corpus` makes sound ones."""

    feed: Callable[[bytes], None]
    corpus: Callable[[Random], list[bytes]]


TARGETS = {
    "requests": Target(feed_stream, stream_corpus),
    "batches": Target(feed_batch, batch_corpus),
    "compressed": Target(feed_compressed, compressed_corpus),
    "client_batches": Target(feed_client_batches, batch_corpus),
    "responses": Target(feed_response, response_corpus),
    "consumer_protocol": Target(feed_consumer_protocol, consumer_protocol_corpus),
    "files": Target(feed_file, file_corpus),
    "view_checkpoints": Target(feed_view_checkpoint, view_checkpoint_corpus),
    "group_records": Target(feed_group_record, group_record_corpus),
    "sasl": Target(feed_sasl, sasl_corpus),
    "gate": Target(feed_gate, gate_corpus),
    "tokens": Target(feed_token, token_corpus),
    "certificates": Target(feed_certificate, certificate_corpus),
    "metadata_values": Target(feed_metadata_value, metadata_corpus),
}
