"""Mean departure delay by carrier and month: computation in plain Python, comparison, and chart.

Pure. Owns the expected result of the demo's Spark query. A flight without a departure (cancelled) counts as a flight,
but not for the mean.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mansio_demo.flights import Flight

YEAR, MONTH, DAY, DELAY, CARRIER, HOUR, MINUTE = 1, 2, 3, 6, 10, 17, 18
"""Fields of a record's value, split at commas; the line number comes first."""

TOLERANCE_MIN = 1e-9
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class Mean(NamedTuple):
    """The flights of a carrier in a month; `delay_min` is None if none of them departed."""

    flights: int
    delay_min: float | None


def departure_ms(flight: Flight) -> int:
    """Scheduled departure, New York's local time as UTC, in milliseconds since the epoch."""
    cells = flight.value.split(b",")
    year, month, day, hour, minute = (int(cells[at]) for at in (YEAR, MONTH, DAY, HOUR, MINUTE))
    moment = datetime(year, month, day, hour, minute, tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def means(flights: Iterable[Flight]) -> dict[tuple[str, int], Mean]:
    """Return the means by carrier and month, computed from the flights."""
    count: dict[tuple[str, int], int] = defaultdict(int)
    delays: dict[tuple[str, int], list[float]] = defaultdict(list)
    for flight in flights:
        cells = flight.value.split(b",")
        key = (cells[CARRIER].decode(), int(cells[MONTH]))
        count[key] += 1
        if cells[DELAY] != b"NA":
            delays[key].append(float(cells[DELAY]))
    return {
        key: Mean(number, sum(delays[key]) / len(delays[key]) if delays[key] else None)
        for key, number in count.items()
    }


def differences(
    expected: Mapping[tuple[str, int], Mean], found: Mapping[tuple[str, int], Mean]
) -> list[tuple[str, int]]:
    """Carriers and months with different numbers of flights or means."""
    return sorted(
        key for key in expected.keys() | found.keys() if not _same(expected.get(key), found.get(key))
    )


def _same(one: Mean | None, other: Mean | None) -> bool:
    if one is None or other is None or one.flights != other.flights:
        return False
    if one.delay_min is None or other.delay_min is None:
        return one.delay_min is other.delay_min
    return abs(one.delay_min - other.delay_min) <= TOLERANCE_MIN


CELL_WIDTH, CELL_HEIGHT, LEFT, TOP = 46, 24, 60, 64
WARM = ((255, 247, 236), (253, 187, 132), (215, 48, 31), (127, 0, 0))
"""From no delay to `DELAY_MAX_MIN` and more."""
DELAY_MAX_MIN = 40.0


def chart_svg(found: Mapping[tuple[str, int], Mean], title: str) -> str:
    """Heat map of carriers and months as SVG."""
    carriers = sorted({carrier for carrier, _ in found})
    width, height = LEFT + 12 * CELL_WIDTH + 20, TOP + len(carriers) * CELL_HEIGHT + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11" viewBox="0 0 {width} {height}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">{title}</text>',
    ]
    for month, name in enumerate(MONTHS):
        parts.append(_text(LEFT + month * CELL_WIDTH + CELL_WIDTH / 2, TOP - 10, name))
    for row, carrier in enumerate(carriers):
        y = TOP + row * CELL_HEIGHT
        parts.append(_text(LEFT / 2, y + 16, carrier))
        for month in range(12):
            mean = found.get((carrier, month + 1))
            if mean is not None and mean.delay_min is not None:
                parts.append(_cell(LEFT + month * CELL_WIDTH, y, mean.delay_min, mean.flights))
    return "\n".join([*parts, "</svg>", ""])


def _cell(x: float, y: float, delay_min: float, flights: int) -> str:
    share = min(max(delay_min / DELAY_MAX_MIN, 0.0), 1.0)
    ink = "white" if share > 0.55 else "#222"
    return (
        f'<g><title>{flights} flights</title><rect x="{x}" y="{y}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" '
        f'fill="{_colour(share)}"/>{_text(x + CELL_WIDTH / 2 - 1, y + 15, f"{delay_min:.0f}", ink)}</g>'
    )


def _colour(share: float) -> str:
    place = share * (len(WARM) - 1)
    index = min(int(place), len(WARM) - 2)
    mixed = (
        round(low + (high - low) * (place - index))
        for low, high in zip(WARM[index], WARM[index + 1], strict=True)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _text(x: float, y: float, text: str, ink: str = "#222") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" fill="{ink}">{text}</text>'
