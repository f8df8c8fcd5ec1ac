"""The figure of `make coverage`: stored by `python -m tools.coverage_figure REPORT`, and put into CONTRIBUTING.md by
`make format`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "coverage.json"


def figure(report: Path) -> dict[str, int]:
    """Return the counts of a JSON report of coverage.py."""
    totals = json.loads(report.read_text())["totals"]
    names = ("num_statements", "covered_lines", "num_branches", "covered_branches")
    return {name: int(totals[name]) for name in names}


def sentence(counts: dict[str, int] | None) -> str:
    """Return the sentence of CONTRIBUTING.md; None: not measured."""
    if counts is None:
        return "Not measured yet."
    statements = 100 * counts["covered_lines"] / counts["num_statements"]
    branches = 100 * counts["covered_branches"] / counts["num_branches"]
    return (
        f"Last run: **{statements:.0f} %** of {counts['num_statements']:,} statements, **{branches:.0f} %** of"
        f" {counts['num_branches']:,} branches."
    )


def document() -> str:
    """Return the sentence with the stored figure."""
    return sentence(json.loads(FILE.read_text()) if FILE.exists() else None)


def main() -> None:
    counts = figure(Path(sys.argv[1]))
    FILE.write_text(json.dumps(counts, indent=2) + "\n")
    print(sentence(counts))


if __name__ == "__main__":
    main()
