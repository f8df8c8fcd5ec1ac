"""Hostile bytes: whatever arrives, the wire answers with a value or a typed error, soon, in bounded memory.

Inputs are real messages of every API and version, mutated, and plain noise; each is fed to the frame reader
whole and byte by byte, and both must come to the same end. A failure names the seed and the number of the
input.
"""

from __future__ import annotations

import os
import resource
import struct
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from crc32c import crc32c

from mansio.errors import UNREADABLE_OR_DAMAGED, WireError
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch, produce
from mansio.wire.batch import record_batch, record_reader
from mansio.wire.batch.compression import decompress
from mansio.wire.codec import messages
from mansio.wire.codec.messages import REQUEST, RESPONSE
from mansio.wire.framing import FrameReader
from mansio.wire.headers import request_header, response_header
from support.tiers import examples
from unit.fuzz.cost import assert_cheap
from unit.fuzz.mutations import framed, mutated
from unit.fuzz.targets import (
    MAX_OUTPUT_BYTES,
    batch_corpus,
    decode_frame,
    decompress_batch,
    request_corpus,
    small_message,
)
from unit.wire.kio_oracle import every_version

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = int(os.environ.get("MANSIO_TEST_FUZZ_SEED", "20"))
REQUESTS = examples(2_500, 56_000)
RESPONSES = examples(1_500, 14_000)
BATCHES = examples(1_200, 24_000)
BODIES = examples(700, 6_000)
MAX_FRAME_BYTES = 4096
MAX_GROWTH_BYTES = 150 * 1024 * 1024


def outcome(data: bytes, step: int) -> list[str]:
    """What became of a stream fed in steps of so many bytes: each frame's bytes and fate, and how it ended."""
    reader = FrameReader(MAX_FRAME_BYTES)
    fates: list[str] = []
    try:
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            while piece:
                room = reader.get_buffer(65536)
                count = min(len(room), len(piece))
                room[:count] = piece[:count]
                piece = piece[count:]
                for frame in reader.buffer_updated(count):
                    fate = bytes(frame).hex()
                    try:
                        decode_frame(frame)
                    except WireError as error:
                        fate += repr(error)
                    fates.append(fate)
    except WireError as error:
        # Frames before it in the same read are lost with it, so only the end can be compared.
        return [repr(error)]
    return [*fates, str(reader.buffered_bytes)]


def run(count: int, salt: int, make: Callable[[Random], Any], feed: Callable[[Any], None]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    random = Random(SEED + salt)
    for number in range(count):
        data = make(random)
        try:
            assert_cheap(feed, data)
        except Exception as error:
            raise AssertionError(f"seed {SEED + salt}, input {number}: {data!r}") from error
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert growth < MAX_GROWTH_BYTES


@pytest.fixture(scope="module")
def requests() -> list[bytes]:
    return request_corpus(Random(SEED))


def test_hostile_requests_whole_and_byte_by_byte(requests: list[bytes]) -> None:
    def make(random: Random) -> bytes:
        kind = random.randrange(10)
        if kind == 0:
            return random.randbytes(random.randrange(40))
        if kind == 1:
            return framed(random.choice((b"GET / HTTP/1.1\r\n", b"\x16\x03\x01")) + random.randbytes(20))[
                random.choice((0, 4)) :
            ]
        if kind == 2:
            return mutated(random, framed(random.choice(requests)) + framed(random.choice(requests)))
        return framed(mutated(random, random.choice(requests)))

    def feed(data: bytes) -> None:
        whole = outcome(data, len(data) or 1)
        assert outcome(data, 1)[-1] == whole[-1]
        if len(whole) > 1:
            assert outcome(data, 1) == whole

    run(REQUESTS, 1, make, feed)


def test_hostile_bodies_in_any_api_and_version() -> None:
    keys = [(key, version) for key, version, direction in every_version(native=True) if direction == REQUEST]

    def make(random: Random) -> bytes:
        key, version = random.choice(keys)
        noise = random.randbytes(random.randrange(60))
        if random.random() < 0.5:  # small numbers look like counts and lengths, and get further
            noise = bytes(byte & 3 for byte in noise)
        return request_header(key, version, 1, "c") + noise

    def feed(data: bytes) -> None:
        with suppress(WireError):
            decode_frame(memoryview(data))

    run(BODIES, 2, make, feed)


def test_hostile_responses() -> None:
    corpus = [
        (
            key,
            version,
            response_header(key, version, 1) + small_message(Random(SEED), key, version, direction),
        )
        for key, version, direction in every_version(native=True)
        if direction == RESPONSE
    ]

    def make(random: Random) -> tuple[int, int, bytes]:
        key, version, data = random.choice(corpus)
        return key, version, mutated(random, data)

    def feed(case: tuple[int, int, bytes]) -> None:
        key, version, data = case
        try:
            if key == ApiKey.PRODUCE:
                produce.decode_response(version, data)
            elif key == ApiKey.FETCH:
                fetch.decode_response(version, data)
            else:
                messages.decode_response_frame(key, version, data)
        except WireError:
            pass

    run(RESPONSES, 3, make, feed)


def test_hostile_batches_with_and_without_a_right_checksum() -> None:
    corpus = batch_corpus(Random(SEED))

    def make(random: Random) -> bytes:
        data = bytearray(mutated(random, random.choice(corpus)))
        if len(data) >= record_batch.HEADER_BYTES and random.random() < 0.8:
            struct.pack_into(">i", data, 8, len(data) - 12)
            struct.pack_into(">I", data, 17, crc32c(data[21:]))
        return bytes(data)

    def feed(data: bytes) -> None:
        decompress_batch(data)
        with suppress(*UNREADABLE_OR_DAMAGED):
            for position, header in record_batch.iterate_batches(data):
                batch = data[position : position + header.size]
                record_reader.read_records(batch, output_bytes_max=MAX_OUTPUT_BYTES)
        for codec in range(6):
            with suppress(*UNREADABLE_OR_DAMAGED):
                assert len(decompress(codec, data[61:], MAX_OUTPUT_BYTES)) <= MAX_OUTPUT_BYTES

    run(BATCHES, 4, make, feed)
