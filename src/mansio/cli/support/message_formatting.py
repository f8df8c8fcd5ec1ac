"""How consumed records are printed: raw values, one JSON object per line, or columns.

Always true: raw output is exactly key, separator, value and delimiter, byte for byte; the JSON of a record can be
turned back into the record; what was printed is flushed before a prompt or an offset says it was.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from mansio.cli.support.formatting import Output, text_or_base64

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import BinaryIO

    from mansio.client.types import Message

TABLE_COLUMNS = ("PARTITION", "OFFSET", "TIMESTAMP", "KEY", "VALUE")
KEY_WIDTH = 16


class Printer:
    """Writes records to standard output in the form asked for."""

    def __init__(
        self,
        output: Output | None,
        *,
        delimiter: bytes = b"\n",
        key_separator: bytes | None = None,
        stream: BinaryIO | None = None,
    ) -> None:
        self._stream = stream or sys.stdout.buffer
        self._delimiter = delimiter
        self._key_separator = key_separator
        forms: dict[Output | None, Callable[[Message], bytes]] = {
            None: self._raw,
            Output.JSON: _json_line,
            Output.TABLE: _table_line,
        }
        self._form = forms[output]
        if output is Output.TABLE:
            self._stream.write(_columns(*TABLE_COLUMNS))

    def show(self, messages: Iterable[Message]) -> None:
        """Print these, and flush."""
        self._stream.write(b"".join(map(self._form, messages)))
        self._stream.flush()

    def _raw(self, message: Message) -> bytes:
        value = (message.value or b"") + self._delimiter
        if self._key_separator is None:
            return value
        return (message.key or b"") + self._key_separator + value


def as_json(message: Message) -> dict[str, Any]:
    """A record as JSON: text where the bytes are UTF-8, else base64 with `<field>_encoding` beside it. One that was
    leased has its `delivery_count`."""
    fields: dict[str, Any] = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp_ms": message.timestamp_ms,
    }
    for name in ("key", "value"):
        text, encoding = text_or_base64(getattr(message, name))
        fields[name] = text
        if encoding:
            fields[f"{name}_encoding"] = encoding
    fields["headers"] = [_json_header(name, content) for name, content in message.headers]
    delivery_count = getattr(message, "delivery_count", None)
    return fields if delivery_count is None else {**fields, "delivery_count": delivery_count}


def _json_header(name: str, content: bytes | None) -> dict[str, Any]:
    text, encoding = text_or_base64(content)
    header: dict[str, Any] = {"name": name, "value": text}
    return {**header, "value_encoding": encoding} if encoding else header


def _json_line(message: Message) -> bytes:
    return json.dumps(as_json(message), ensure_ascii=False).encode() + b"\n"


def _table_line(message: Message) -> bytes:
    when = (
        message.timestamp.astimezone().isoformat(timespec="milliseconds")
        if message.timestamp_ms >= 0
        else "-"
    )
    return _columns(
        str(message.partition), str(message.offset), when, _printable(message.key), _printable(message.value)
    )


def _columns(partition: str, offset: str, when: str, key: str, value: str) -> bytes:
    return f"{partition:>9}  {offset:>10}  {when:<29}  {key:<{KEY_WIDTH}}  {value}\n".encode()


def _printable(data: bytes | None) -> str:
    """Bytes on one line of a terminal: control characters and what is no UTF-8 as `\\xNN`."""
    if data is None:
        return "-"
    text = data.decode(errors="backslashreplace")
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
