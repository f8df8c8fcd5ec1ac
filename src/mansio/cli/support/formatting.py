"""Output formats: tables, JSON and printed records, chosen by `--output`.

Invariants:
* Results go to standard output, everything else to standard error.
* If standard output is not a terminal, a table is plain aligned text, one row per line, never truncated.
* JSON has every field of the table, and may have more.
"""

from __future__ import annotations

import base64
import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import BinaryIO

    from mansio.client.types import Message

COLUMN_GAP_CHARACTERS = 2


class Output(StrEnum):
    """Output format: a table for people or JSON for programs."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[
    Output,
    typer.Option("--output", "-o", envvar="MANSIO_OUTPUT", help="A table for people, JSON for programs."),
]


def show_rows(
    output: Output, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, empty: str
) -> None:
    """Print rows as JSON with all fields, or as a table of `columns`. `empty`: message instead of a table
    without rows.
    """
    if output is Output.JSON:
        show_json(rows)
    elif rows:
        show_table(columns, [[format_cell(row[column]) for column in columns] for row in rows])
    else:
        print(empty, file=sys.stderr)


def count_text(count: int, noun: str) -> str:
    """Return a number with a noun, in the singular for one: `1 record`, `1,200 records`, `2 batches`."""
    plural = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def show_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=str)
    sys.stdout.write("\n")
    sys.stdout.flush()


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with headings. Columns of numbers are right-aligned."""
    titles = [column.replace("_", " ").upper() for column in columns]
    if sys.stdout.isatty():
        _print_table_with_rich(titles, rows)
        return
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    numeric = _are_numeric(rows, len(titles))
    for row in (titles, *rows):
        cells = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ]
        print((" " * COLUMN_GAP_CHARACTERS).join(cells).rstrip())
    sys.stdout.flush()


def _print_table_with_rich(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, COLUMN_GAP_CHARACTERS, 0, 0))
    for title, right in zip(titles, _are_numeric(rows, len(titles)), strict=True):
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*[Text(text) for text in row])
    Console(highlight=False).print(table)


def _are_numeric(rows: Sequence[Sequence[str]], count: int) -> list[bool]:
    return [
        bool(rows)
        and all(row[column].lstrip("-").replace(",", "").isdigit() or row[column] == "-" for row in rows)
        for column in range(count)
    ]


def format_cell(value: Any) -> str:
    """Return the text of a value in a table; a dash for a missing value."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "-"
    return str(value)


def text_or_base64(data: bytes | None) -> tuple[str | None, str | None]:
    """Convert bytes for JSON: (text, None) if they are UTF-8, else (base64 text, "base64"); (None, None) for null."""
    if data is None:
        return None, None
    try:
        return data.decode(), None
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"


# -- messages --------


RECORD_COLUMNS = ("PARTITION", "OFFSET", "TIMESTAMP", "KEY", "VALUE")
KEY_COLUMN_CHARACTERS = 16


class RecordPrinter:
    """Prints records to standard output as raw values (`output` None), JSON or table rows."""

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
        self._output = output
        self._format_line = forms[output]
        if output is Output.TABLE:
            self._stream.write(_record_line(*RECORD_COLUMNS))

    def show(self, messages: Iterable[Message]) -> None:
        """Print these records and flush the output."""
        self._stream.write(b"".join(map(self._format_line, messages)))
        self._stream.flush()

    def show_decoded(self, messages: Iterable[Message], decoded: Iterable[Mapping[str, Any]]) -> None:
        """Print these records with the decoded key and value of each, which are plain JSON, and flush the output. What
        is missing in `decoded` is printed as it is in the record.
        """
        lines = [self._decoded_line(message, one) for message, one in zip(messages, decoded, strict=True)]
        self._stream.write(b"".join(lines))
        self._stream.flush()

    def _decoded_line(self, message: Message, decoded: Mapping[str, Any]) -> bytes:
        if self._output is Output.JSON:
            fields = record_as_json(message)
            for name, value in decoded.items():
                fields[name] = value
                fields.pop(f"{name}_encoding", None)
            return json.dumps(fields, ensure_ascii=False).encode() + b"\n"
        key, value = (
            json.dumps(decoded[name], ensure_ascii=False, separators=(",", ":")).encode()
            if name in decoded
            else getattr(message, name)
            for name in ("key", "value")
        )
        return self._format_line(message._replace(key=key, value=value))

    def _raw(self, message: Message) -> bytes:
        value = (message.value or b"") + self._delimiter
        if self._key_separator is None:
            return value
        return (message.key or b"") + self._key_separator + value


def record_as_json(message: Message) -> dict[str, Any]:
    """Return a record as a JSON object. Bytes that are not UTF-8 are base64, marked by a field `<name>_encoding`. A
    leased record also has `delivery_count`.
    """
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
    return json.dumps(record_as_json(message), ensure_ascii=False).encode() + b"\n"


def _table_line(message: Message) -> bytes:
    when = (
        message.timestamp.astimezone().isoformat(timespec="milliseconds")
        if message.timestamp_ms >= 0
        else "-"
    )
    return _record_line(
        str(message.partition), str(message.offset), when, printable(message.key), printable(message.value)
    )


def _record_line(partition: str, offset: str, when: str, key: str, value: str) -> bytes:
    return f"{partition:>9}  {offset:>10}  {when:<29}  {key:<{KEY_COLUMN_CHARACTERS}}  {value}\n".encode()


def printable(data: bytes | None) -> str:
    """Bytes on one line of a terminal: control characters and invalid UTF-8 as `\\xNN`."""
    if data is None:
        return "-"
    text = data.decode(errors="backslashreplace")
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
