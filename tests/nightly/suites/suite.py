"""What a suite is: a name, a pinned version, the programs it needs, and a function that runs it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from nightly.suites.expected import Expected

WORK: Final = ROOT / ".nightly" / "suites"
"""Copies of the suites, their programs and their logs. The downloads are in the caches of Go, npm and Maven."""


class Outcome(StrEnum):
    """Of one test."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


Outcomes = dict[str, Outcome]


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite.

    `run` takes the suite's directory, what is expected, and the names of the tests to run, or None for all that are not
    expected to be skipped. It returns the outcome of each test that ran; one that was killed or never came to its
    end has failed.
    """

    name: str
    version: str
    programs: tuple[str, ...]
    run: Callable[[Path, Expected, frozenset[str] | None], Outcomes]
    setup: str
    """Brokers and settings it runs with, for the document."""
    once_more: bool = True
    """Whether a test that failed unexpectedly is run again alone."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        return WORK / self.name

    def missing_programs(self) -> list[str]:
        return [program for program in self.programs if shutil.which(program) is None]
