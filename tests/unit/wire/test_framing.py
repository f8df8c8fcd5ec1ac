"""Frame reader: the same frames for any read sizes, and memory that follows the received bytes."""

from __future__ import annotations

from random import Random

import pytest

from mansio.errors import FrameTooLarge
from mansio.wire.framing import (
    ATTACHED_FRAME_BYTES_MAX,
    IDLE_BUFFER_BYTES_MAX,
    PARTIAL_FRAME_BYTES_MAX,
    SCRATCH_BUFFER_BYTES,
    SHRINK_AFTER_READS,
    FrameReader,
    new_scratch_buffer,
)

LIMIT = 16 << 20


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def feed(reader: FrameReader, data: bytes, step: int = 1 << 30) -> list[bytes]:
    """Push bytes through as a socket would, at most `step` at a time; copies of the frames."""
    frames: list[bytes] = []
    view = memoryview(data)
    while view:
        room = reader.get_buffer(65536)
        assert room
        count = min(len(room), len(view), step)
        room[:count] = view[:count]
        view = view[count:]
        frames += [bytes(frame) for frame in reader.buffer_updated(count)]
    return frames


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 64, 1000, 65_536, 1 << 30])
def test_frames_do_not_depend_on_the_size_of_reads(step: int) -> None:
    random = Random(3)
    sizes = [0, 1, 3, 4, 100, 1000, 70_000, 5, 200_000 if step > 3 else 900, 0, 12]
    frames = [random.randbytes(size) for size in sizes]
    reader = FrameReader(LIMIT)
    assert feed(reader, b"".join(map(framed, frames)), step) == frames
    assert reader.buffered_bytes == 0


def test_frames_are_the_same_in_random_steps_with_partial_tails() -> None:
    random = Random(4)
    frames = [random.randbytes(random.randrange(random.choice((10, 1000, 100_000)))) for _ in range(300)]
    reader = FrameReader(LIMIT)
    stream = b"".join(map(framed, frames))
    found: list[bytes] = []
    while stream:
        step = random.randrange(1, random.choice((20, 5_000, 200_000)))
        found += feed(reader, stream[:step])
        stream = stream[step:]
    assert found == frames


def test_whole_frame_in_one_read_is_not_copied() -> None:
    reader = FrameReader(LIMIT)
    room = reader.get_buffer(65536)
    room[:8] = framed(b"abcd")
    (frame,) = reader.buffer_updated(8)
    room[4:8] = b"wxyz"
    assert bytes(frame) == b"wxyz"


def test_large_frames_are_detached_and_stay_valid() -> None:
    random = Random(5)
    sizes = [10, ATTACHED_FRAME_BYTES_MAX, ATTACHED_FRAME_BYTES_MAX + 1, 3, 9 << 20, 100_000, 20_000, 400_000]
    frames = [random.randbytes(size) for size in (*sizes, *random.sample(sizes[1:], k=5))]
    stream = b"".join(map(framed, frames))
    reader = FrameReader(LIMIT, detaches_large_frames=True)
    found: list[bytes | memoryview] = []
    while stream:
        room = reader.get_buffer(65536)
        count = min(len(room), len(stream), random.randrange(1, random.choice((20_000, 3_000_000))))
        room[:count] = stream[:count]
        stream = stream[count:]
        found += [
            frame if len(frame) > ATTACHED_FRAME_BYTES_MAX else bytes(frame)
            for frame in reader.buffer_updated(count)
        ]
    assert found == frames
    assert reader.private_buffer_bytes == 0


def test_views_are_valid_until_the_next_get_buffer() -> None:
    reader = FrameReader(LIMIT)
    data = b"".join(framed(bytes([n]) * 50) for n in range(100))
    room = reader.get_buffer(65536)
    room[: len(data)] = data
    frames = reader.buffer_updated(len(data))
    assert [bytes(frame) for frame in frames] == [bytes([n]) * 50 for n in range(100)]


@pytest.mark.parametrize(
    "length", [b"\xff\xff\xff\xff", b"\x80\x00\x00\x00", b"\x00\x00\x04\x01", b"\x7f\xff\xff\xff"]
)
@pytest.mark.parametrize("step", [1, 4, 100])
def test_negative_and_huge_lengths_are_refused(length: bytes, step: int) -> None:
    with pytest.raises(FrameTooLarge):
        feed(FrameReader(1024), length + b"x" * 8, step)


def test_largest_frame_allowed_is_accepted() -> None:
    assert feed(FrameReader(1024), framed(b"x" * 1024), 100) == [b"x" * 1024]


def test_memory_follows_received_bytes_not_announced_lengths() -> None:
    reader = FrameReader(1 << 30)
    feed(reader, (1 << 29).to_bytes(4, "big") + b"x" * 10)
    reader.get_buffer(65536)
    assert reader.private_buffer_bytes == reader.buffered_bytes == 14
    feed(reader, b"x" * 1_000_000)
    reader.get_buffer(65536)
    assert reader.private_buffer_bytes <= 2 * 1_000_014 + SCRATCH_BUFFER_BYTES


def test_large_frame_allocates_no_more_than_its_size() -> None:
    reader = FrameReader(LIMIT)
    feed(reader, framed(b"x" * 3_000_000)[:-1])
    reader.get_buffer(65536)
    assert reader.private_buffer_bytes == 3_000_004


def test_buffer_of_a_huge_frame_is_released_immediately() -> None:
    reader = FrameReader(LIMIT)
    feed(reader, framed(b"x" * (IDLE_BUFFER_BYTES_MAX + 1)))
    reader.get_buffer(65536)
    assert reader.private_buffer_bytes == 0


def test_private_buffer_is_kept_while_busy_and_released_for_small_frames() -> None:
    reader = FrameReader(LIMIT)
    large, small = framed(b"x" * 500_000), framed(b"x" * 100)
    feed(reader, large)
    capacity = reader.private_buffer_bytes
    for _ in range(SHRINK_AFTER_READS * 2):
        reader.get_buffer(65536)
        assert reader.private_buffer_bytes == capacity, "a connection in use keeps its buffer"
        feed(reader, large)
    for _ in range(SHRINK_AFTER_READS + 2):
        feed(reader, small)
    reader.get_buffer(65536)
    assert reader.private_buffer_bytes == 0


def test_readers_that_share_a_scratch_never_mix_their_bytes() -> None:
    """Many connections on one loop, each read in turn, each with another frame half received."""
    random = Random(5)
    scratch = new_scratch_buffer()
    readers = [FrameReader(LIMIT, scratch) for _ in range(12)]
    frames = [
        [
            random.randbytes(
                random.randrange(random.choice((10, 1000, 2 * PARTIAL_FRAME_BYTES_MAX, 200_000)))
            )
            for _ in range(60)
        ]
        for _ in readers
    ]
    streams = [b"".join(map(framed, of_one)) for of_one in frames]
    found: list[list[bytes]] = [[] for _ in readers]
    while any(streams):
        number = random.choice([number for number, stream in enumerate(streams) if stream])
        step = random.randrange(1, random.choice((20, 5_000, PARTIAL_FRAME_BYTES_MAX, 300_000)))
        found[number] += feed(readers[number], streams[number][:step])
        streams[number] = streams[number][step:]
        if random.random() < 0.1:
            readers[number].release_memory()
        if random.random() < 0.1:
            readers[number].get_buffer(
                65536
            )  # a transport may ask, find nothing to read, and ask again later
        scratch[:] = bytes(SCRATCH_BUFFER_BYTES)
    assert found == frames


def test_idle_connection_holds_no_memory() -> None:
    reader = FrameReader(LIMIT, new_scratch_buffer())
    feed(reader, framed(b"x" * 1000) * 100)
    assert reader.private_buffer_bytes == reader.buffered_bytes == 0
    feed(reader, framed(b"x" * 500_000))
    assert reader.private_buffer_bytes > 500_000
    reader.release_memory()
    assert reader.private_buffer_bytes == 0


@pytest.mark.parametrize(
    "sent", [1, 3, 5, PARTIAL_FRAME_BYTES_MAX, PARTIAL_FRAME_BYTES_MAX + 1, SCRATCH_BUFFER_BYTES, 300_000]
)
def test_idle_connection_holds_only_its_incomplete_frame(sent: int) -> None:
    frame = bytes(range(256)) * 8192
    reader = FrameReader(LIMIT)
    feed(reader, framed(frame)[:sent])
    reader.release_memory()
    assert reader.buffered_bytes == sent
    assert reader.private_buffer_bytes <= 2 * sent
    assert feed(reader, framed(frame)[sent:] + framed(b"next")) == [frame, b"next"]
