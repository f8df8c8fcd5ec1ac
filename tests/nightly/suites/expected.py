"""Lists of tests that are expected to fail or are skipped, each with its reason, and the comparison with a run.

A list is `expected/SUITE.toml` with the tables `failed`, `skipped` and `unsteady`: test = "reason". Skipped tests are
left out of the run or skip themselves; unsteady ones may pass or fail, for a reason that is not the broker's.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nightly.suites.suite import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nightly.suites.suite import Outcomes

LISTS: Final = Path(__file__).parent / "expected"


@dataclass(frozen=True, slots=True)
class Expected:
    """Test -> reason, of one suite."""

    failed: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    unsteady: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, suite: str, lists: Path = LISTS) -> Expected:
        """The list of `suite`; ValueError for an unknown table, an empty reason or a test in two tables."""
        tables = tomllib.loads((lists / f"{suite}.toml").read_text())
        names = Counter(name for table in tables.values() for name in table)
        wrong = [
            *(f"unknown table {table}" for table in tables if table not in ("failed", "skipped", "unsteady")),
            *(f"{name} is listed twice" for name, times in names.items() if times > 1),
            *(f"{name} has no reason" for table in tables.values() for name in table if not table[name]),
        ]
        if wrong:
            raise ValueError(f"{suite}.toml: {'; '.join(wrong)}")
        return cls(**tables)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a run showed that is not in the list, as sorted names of tests."""

    failures: list[str]
    passes: list[str]
    """Listed as failed, and passed."""
    skips: list[str]
    """Skipped themselves and are not listed."""
    absent: list[str]
    """Listed as failed, and were not run."""

    @property
    def as_expected(self) -> bool:
        return not (self.failures or self.passes or self.skips or self.absent)

    def lines(self) -> list[str]:
        """One for each difference."""
        return [
            *(f"unexpected failure: {name}" for name in self.failures),
            *(f"unexpected pass, take it out of the list: {name}" for name in self.passes),
            *(f"unexpected skip: {name}" for name in self.skips),
            *(f"in the list, and not run: {name}" for name in self.absent),
        ]


def compare(outcomes: Outcomes, expected: Expected) -> Comparison:
    """The differences between a run and the list."""

    def named(outcome: Outcome) -> set[str]:
        return {name for name, each in outcomes.items() if each is outcome}

    known = set(expected.failed) | set(expected.unsteady)
    return Comparison(
        failures=sorted(named(Outcome.FAILED) - known),
        passes=sorted(named(Outcome.PASSED) & (set(expected.failed) | set(expected.skipped))),
        skips=sorted(named(Outcome.SKIPPED) - set(expected.skipped)),
        absent=sorted(set(expected.failed) - set(outcomes)),
    )
