"""Records from a stream of bytes, however it is cut."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.cli.records import produce as source
from mansio.cli.records.produce import RecordFormat, RecordSplitter, split_key_and_value
from mansio.errors import InvalidRecord
from support.machine import scaled

if TYPE_CHECKING:
    from pathlib import Path


@given(
    st.lists(
        st.binary(max_size=20).map(lambda record_bytes: record_bytes.replace(b"|", b"").replace(b"-", b""))
    ),
    st.sampled_from([b"|", b"--"]),
    st.integers(1, 7),
)
def test_pieces_are_the_same_however_the_stream_is_cut(
    records: list[bytes], delimiter: bytes, size: int
) -> None:
    stream = b"".join(record_bytes + delimiter for record_bytes in records)
    splitter = RecordSplitter(delimiter)
    found: list[bytes] = []
    for start in range(0, len(stream), size):
        found += splitter.feed(stream[start : start + size])
    assert found + splitter.end() == records


def test_what_follows_the_last_delimiter_is_a_record_too() -> None:
    splitter = RecordSplitter(b"\n")
    assert splitter.feed(b"a\n\nb") == [b"a", b""]
    assert splitter.end() == [b"b"]
    assert splitter.end() == []


def test_without_delimiter_the_whole_input_is_one_record() -> None:
    splitter = RecordSplitter(b"")
    assert splitter.feed(b"a\n\x00") == []
    assert splitter.feed(b"\xff") == []
    assert splitter.end() == [b"a\n\x00\xff"]


def test_a_record_without_end_is_refused_before_it_fills_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "RECORD_BYTES_MAX", 10)
    splitter = RecordSplitter(b"\n")
    splitter.feed(b"123456")
    with pytest.raises(InvalidRecord, match="no delimiter within 10 bytes"):
        splitter.feed(b"78901")


@pytest.mark.parametrize(
    ("record_bytes", "record_format", "expected"),
    [
        (b"v", RecordFormat(), (None, b"v")),
        (b"", RecordFormat(), (None, b"")),
        (b"", RecordFormat(empty_is_null=True), (None, None)),
        (b"v", RecordFormat(key=b"k"), (b"k", b"v")),
        (b"k:v:w", RecordFormat(key_separator=b":"), (b"k", b"v:w")),
        (b":v", RecordFormat(key_separator=b":"), (b"", b"v")),
        (b"k:", RecordFormat(key_separator=b":", empty_is_null=True), (b"k", None)),
    ],
)
def test_key_and_value_of_a_line(
    record_bytes: bytes, record_format: RecordFormat, expected: tuple[bytes | None, bytes | None]
) -> None:
    assert split_key_and_value(record_bytes, record_format, 1) == expected


def test_a_line_without_key_separator_is_named() -> None:
    with pytest.raises(InvalidRecord, match="record 7 has no key separator b':'"):
        split_key_and_value(b"nothing", RecordFormat(key_separator=b":"), 7)


def read(descriptor: int) -> bytes:
    async def collect() -> bytes:
        return b"".join([chunk async for chunk in source.read_chunks(descriptor)])

    return asyncio.run(collect())


def test_a_file_is_read_to_its_end(tmp_path: Path) -> None:
    content = os.urandom(source.READ_CHUNK_BYTES * 2 + 5)
    path = tmp_path / "input"
    path.write_bytes(content)
    with path.open("rb") as file:
        assert read(file.fileno()) == content


def test_a_pipe_gives_what_it_has_before_it_ends() -> None:
    async def story() -> tuple[bytes, bytes]:
        reader, writer = os.pipe()
        chunks = source.read_chunks(reader)
        os.write(writer, b"first")
        first = await asyncio.wait_for(anext(chunks), scaled(20))
        os.write(writer, b"second")
        second = await asyncio.wait_for(anext(chunks), scaled(20))
        os.close(writer)
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(chunks), scaled(20))
        os.close(reader)
        return first, second

    assert asyncio.run(story()) == (b"first", b"second")


def test_waiting_for_a_silent_pipe_can_be_interrupted() -> None:
    async def story() -> None:
        reader, writer = os.pipe()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(source.read_chunks(reader)), 0.05)
        os.close(reader)
        os.close(writer)

    asyncio.run(story())
