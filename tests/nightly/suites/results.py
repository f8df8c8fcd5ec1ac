"""Results of the last recorded runs in `results.json`, from which docs/reference/compatibility.md is generated."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nightly.suites.suite import Outcome

if TYPE_CHECKING:
    from nightly.suites.expected import Expected
    from nightly.suites.suite import Outcomes, Suite

RESULTS: Final = Path(__file__).parent / "results.json"


def summary(suite: Suite, outcomes: Outcomes, expected: Expected, commit: str) -> dict[str, Any]:
    """The entry of one run, of the broker's source at `commit`.

    Failures and skips are counted by reason; one without a listed reason is `not expected`.
    """
    reasons = {**expected.failed, **expected.unsteady}
    failed = [name for name, outcome in outcomes.items() if outcome is Outcome.FAILED]
    skipped = {name for name, outcome in outcomes.items() if outcome is Outcome.SKIPPED} | set(
        expected.skipped
    )
    return {
        "version": suite.version,
        "setup": suite.setup,
        "commit": commit,
        "passed": sum(outcome is Outcome.PASSED for outcome in outcomes.values()),
        "failed": dict(Counter(reasons.get(name, "not expected") for name in failed)),
        "skipped": dict(Counter(expected.skipped.get(name, "not expected") for name in sorted(skipped))),
    }


def read(path: Path = RESULTS) -> dict[str, Any]:
    """Suite -> entry, as recorded."""
    recorded: dict[str, Any] = json.loads(path.read_text())
    return recorded


def write(entries: dict[str, Any], path: Path = RESULTS) -> None:
    """Replace the entries of these suites and keep the others, with what was measured before."""
    recorded = read(path)
    for name, entry in entries.items():
        recorded[name] = {
            **({"before": recorded[name]["before"]} if "before" in recorded.get(name, {}) else {}),
            **entry,
        }
    path.write_text(json.dumps(recorded, indent=1, sort_keys=False) + "\n")
