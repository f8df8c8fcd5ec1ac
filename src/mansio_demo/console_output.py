"""Output of the demos: at most 80 columns, progress bars on a terminal, plain lines elsewhere.

Invariants:
* No decision is made here; all numbers come from the caller.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio_demo.record_checker import CheckResult

LABEL_WIDTH = 11
BAR_WIDTH = 30
PLAIN_STEPS = 4
COLUMNS_MAX = 80


class Measurements(NamedTuple):
    """Measurements. Rates in records per second over the whole run, including the kill; times in seconds."""

    publish_rate: float
    deliver_rate: float
    ready_again_s: float
    pause_s: float


class Bars:
    """Two progress bars with the same total."""

    def __init__(
        self, console: Console, total: int, labels: tuple[str, str] = ("acknowledged", "delivered")
    ) -> None:
        self._console = console
        self._total = total
        self._labels = labels
        self._steps_printed = 0
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=BAR_WIDTH),
                TextColumn("{task.completed:>9,} of {task.total:,}"),
                TextColumn("[dim]{task.fields[rate]:>9,.0f}/s"),
                console=console,
            )
            self._tasks = [
                self._progress.add_task(f" {label:<{LABEL_WIDTH + 1}}", total=total, rate=0.0)
                for label in labels
            ]

    def show(self, first: int, second: int, seconds: float) -> None:
        """Update both bars."""
        if self._progress is not None:
            for task, count in zip(self._tasks, (first, second), strict=True):
                if not self._progress.tasks[task].finished:  # a completed bar keeps its rate
                    self._progress.update(task, completed=count, rate=count / max(seconds, 0.001))
            return
        step = min(first, second) * PLAIN_STEPS // self._total
        if step > self._steps_printed:
            self._steps_printed = step
            self._console.print(
                f" {seconds:6.1f} s     {self._labels[0]} {first:>9,}   {self._labels[1]} {second:>9,}"
            )

    def print_line(self, label: str, text: str) -> None:
        """Print a line above the bars."""
        print_line(self._progress.console if self._progress else self._console, label, text)

    @contextlib.contextmanager
    def moving(self) -> Iterator[Bars]:
        with self._progress or contextlib.nullcontext():
            yield self


def new_console() -> Console:
    """Return standard output, at most 80 columns wide; 80 if it is not a terminal."""
    console = Console(highlight=False)
    console.width = min(console.width, COLUMNS_MAX)
    return console


def print_line(console: Console, label: str, text: str) -> None:
    """Print one labelled line."""
    console.print(Text.assemble((f" {label:<{LABEL_WIDTH}}  ", "bold"), text), soft_wrap=True)


def show_outcome(console: Console, result: CheckResult, figures: Measurements) -> None:
    """Print the result table."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(width=22)
    table.add_column(justify="right", width=11)
    table.add_column()
    for label, count, meaning in (
        ("acknowledged", result.acknowledged, "acks=all: on disk before each answer"),
        ("delivered", result.delivered, f"to 3 consumers of a group; {result.redelivered:,} read twice"),
    ):
        table.add_row(f" {label}", f"{count:,}", Text(meaning, style="dim"))
    for label, count, meaning in (
        ("acknowledged, missing", result.missing + result.misplaced, "each came, from the offset answered"),
        ("duplicates", result.duplicates, "retries after the kill were recognised"),
        (
            "out of order",
            result.out_of_order + result.gaps,
            f"{result.keys:,} aircraft, each in order of departure",
        ),
    ):
        style = "bold green" if count == 0 else "bold red"
        table.add_row(
            f" {label}", Text(f"{count:,}", style=style), Text(meaning if count == 0 else "", style="dim")
        )
    for label, figure, meaning in (
        ("publish rate", f"{figures.publish_rate:,.0f}/s", "over the whole run, kill included"),
        ("deliver rate", f"{figures.deliver_rate:,.0f}/s", "at the same time, in the same process"),
        (
            "recovery",
            f"{figures.pause_s:.2f} s",
            f"SIGKILL to next ack; {figures.ready_again_s:.2f} s until ready",
        ),
    ):
        table.add_row(f" {label}", figure, Text(meaning, style="dim"))
    console.print()
    console.print(table)


def show_next(console: Console) -> None:
    """Print commands to try next."""
    console.print()
    console.print(" [bold]Try next[/]  (each in its own terminal)")
    mansio = mansio_command()
    for command in (
        f"{mansio} serve --data ./data",
        f"{mansio} topic create orders --partitions 3",
        f"echo '2 apples' | {mansio} produce orders",
        f"{mansio} consume orders --from-beginning",
    ):
        console.print(f"   {command}")


def mansio_command() -> str:
    """How to call `mansio` here: its name if it is on PATH, else its path."""
    if shutil.which("mansio"):
        return "mansio"
    beside_us = Path(sys.executable).with_name("mansio")
    here = Path.cwd()
    return str(beside_us.relative_to(here) if beside_us.is_relative_to(here) else beside_us)
