"""How results are printed: a table for people, JSON for programs, chosen by `--output`.

Always true: results go to standard output, everything else to standard error; a table that does not go to a
terminal is plain aligned text, one row per line, never cut; JSON carries every field a table shows,
and more.
"""

from __future__ import annotations

import base64
import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COLUMN_GAP = 2


class Output(StrEnum):
    """A table for people or JSON for programs."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[
    Output,
    typer.Option("--output", "-o", envvar="MANSIO_OUTPUT", help="A table for people, JSON for programs."),
]


def show_rows(
    output: Output, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, empty: str
) -> None:
    """A list of things: JSON has all fields of all rows, the table the `columns`; `empty` says what is
    missing.
    """
    if output is Output.JSON:
        show_json(rows)
    elif rows:
        show_table(columns, [[cell(row[column]) for column in columns] for row in rows])
    else:
        print(empty, file=sys.stderr)


def show_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=str)
    sys.stdout.write("\n")
    sys.stdout.flush()


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Headings and aligned rows; numbers to the right."""
    titles = [column.replace("_", " ").upper() for column in columns]
    if sys.stdout.isatty():
        _show_rich(titles, rows)
        return
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    numeric = _numeric(rows, len(titles))
    for row in (titles, *rows):
        cells = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ]
        print((" " * COLUMN_GAP).join(cells).rstrip())
    sys.stdout.flush()


def _show_rich(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, COLUMN_GAP, 0, 0))
    for title, right in zip(titles, _numeric(rows, len(titles)), strict=True):
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*[Text(text) for text in row])
    Console(highlight=False).print(table)


def _numeric(rows: Sequence[Sequence[str]], count: int) -> list[bool]:
    return [
        bool(rows)
        and all(row[column].lstrip("-").replace(",", "").isdigit() or row[column] == "-" for row in rows)
        for column in range(count)
    ]


def cell(value: Any) -> str:
    """A value in a table; what is not there is a dash."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "-"
    return str(value)


def text_or_base64(data: bytes | None) -> tuple[str | None, str | None]:
    """Bytes for JSON: (text, None) where they are UTF-8, (base64, "base64") where not, (None, None) for
    null.
    """
    if data is None:
        return None, None
    try:
        return data.decode(), None
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"
