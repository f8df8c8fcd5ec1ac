"""What `mansio consume` prints must be the record, whatever bytes it holds."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mansio.cli.support.formatting import Output, RecordPrinter
from mansio.client.types import Message

NASTY = Message("t", 1, 7, 1384992000000, b"\xff\x00", b"line\n\x1b[31m\xfe", (("h", b"\x80"), ("h", None)))


def printed(message: Message, output: Output | None, **options: Any) -> bytes:
    stream = io.BytesIO()
    RecordPrinter(output, stream=stream, **options).show([message])
    return stream.getvalue()


def test_raw_output_is_the_value_byte_for_byte() -> None:
    assert printed(NASTY, None) == b"line\n\x1b[31m\xfe\n"
    assert printed(NASTY, None, delimiter=b"") == b"line\n\x1b[31m\xfe"
    assert printed(NASTY, None, key_separator=b":") == b"\xff\x00:line\n\x1b[31m\xfe\n"


@given(
    st.none() | st.binary(),
    st.none() | st.binary(),
    st.lists(st.tuples(st.text(), st.none() | st.binary()), max_size=3).map(tuple),
)
def test_a_json_line_can_be_turned_back_into_the_record(
    key: bytes | None, value: bytes | None, headers: Any
) -> None:
    def back(fields: dict, name: str) -> bytes | None:
        if fields[name] is None:
            return None
        if fields.get(f"{name}_encoding") == "base64":
            return base64.b64decode(fields[name])
        return fields[name].encode()

    line = printed(Message("t", 1, 7, 5, key, value, headers), Output.JSON)
    assert line.count(b"\n") == 1
    fields = json.loads(line)
    assert (fields["topic"], fields["partition"], fields["offset"], fields["timestamp_ms"]) == ("t", 1, 7, 5)
    assert (back(fields, "key"), back(fields, "value")) == (key, value)
    assert tuple((header["name"], back(header, "value")) for header in fields["headers"]) == headers


def test_a_table_line_cannot_steer_the_terminal() -> None:
    lines = printed(NASTY, Output.TABLE).decode().splitlines()
    assert len(lines) == 2
    assert "\x1b" not in lines[1]
    assert r"line\n\x1b[31m\xfe" in lines[1]
