"""Counts of the nightly tests: collected in `.nightly/counts` and summed here.

`python -m support.nightly_counts [FILE]` (with `tests` on PYTHONPATH) prints the table, as `make nightly` does. A line
of the file is one JSON object, one short write: processes do not mix theirs. Nothing is written where the
directory does not exist, as in `make test`. Numbers of one name are added, those called
`longest_...` compared, lists joined, mappings added by key.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

COUNTS: Final = ROOT / ".nightly" / "counts"

Counted = float | list[float] | dict[str, float]


def leave(
    what: str, into: Path = COUNTS, /, **counted: float | Sequence[float] | Mapping[str, float]
) -> None:
    """Add one line about `what`."""
    if into.parent.is_dir():
        with into.open("a") as file:
            file.write(json.dumps({"what": what, **counted}) + "\n")


def added(lines: Iterator[str]) -> dict[str, dict[str, Counted]]:
    """The sums by what was counted, in the order of the first of each; `times`: how many lines there were."""
    sums: dict[str, dict[str, Any]] = {}
    for line in lines:
        one = json.loads(line)
        so_far = sums.setdefault(one.pop("what"), {"times": 0})
        so_far["times"] += 1
        for name, value in one.items():
            so_far[name] = _together(name, so_far[name], value) if name in so_far else value
    return sums


def _together(name: str, one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return dict(Counter(one) + Counter(other))
    if name.startswith("longest_"):
        return max(one, other)
    return one + other  # numbers, or lists


def _shown(value: Counted) -> str:
    if isinstance(value, dict):
        return f"{sum(value.values())} (" + ", ".join(f"{key} {value[key]}" for key in sorted(value)) + ")"
    if isinstance(value, list):
        if not value:
            return "none"
        return f"{len(value)}, median {statistics.median(value):.2f}, longest {max(value):.2f}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(path: Path) -> list[str]:
    """One line for each thing that was counted."""
    with path.open() as lines:
        sums = added(lines)
    return [
        f"{what}: "
        + ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in counted.items())
        for what, counted in sums.items()
    ]


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else COUNTS
    print(*(table(where) if where.exists() else ["nothing was counted"]), sep="\n")
