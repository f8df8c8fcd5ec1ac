"""What the demos proved: one table at the end, also over several runs of the command.

`make demo` runs the chapters in two commands, because Spark is installed between them; a report file carries the rows
of the first command to the second one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console


class Proof(NamedTuple):
    """One claim, how the demo tested it, the figure that it found, and whether the claim holds."""

    claim: str
    test: str
    figure: str
    holds: bool


def read_report(path: str) -> list[Proof]:
    """Return the rows of a report file; none if it does not exist. Raises `ValueError` if it is not a report."""
    file = Path(path)
    if not file.exists():
        return []
    try:
        return [Proof(*row) for row in json.loads(file.read_text(encoding="utf-8"))]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a report of the demo: {error}") from error


def write_report(path: str, proofs: Iterable[Proof]) -> None:
    """Replace the rows of a report file."""
    Path(path).write_text(json.dumps(list(proofs)), encoding="utf-8")


def show_proofs(console: Console, proofs: Iterable[Proof]) -> None:
    """Print the table of all claims."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(" what was proved")
    table.add_column("how")
    table.add_column("figure", justify="right")
    for claim, test, figure, holds in proofs:
        table.add_row(
            Text(f" {claim}"),
            Text(test, style="dim"),
            Text(figure if holds else f"NO: {figure}", style="green" if holds else "bold red"),
        )
    console.print()
    console.print(table)
