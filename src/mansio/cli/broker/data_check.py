"""`mansio data check DIR`: offline check and repair of a data directory, similar to fsck.

Prints one line per finding, worst first, a damage map of each damaged partition, and a table per topic.
Exit codes: 0 no damage; 1 damage; 2 not checked (a broker uses the directory, or it is not a data directory). A missing
index is not damage: a broker that was killed may leave a segment without one, and the next start rebuilds it.

Invariants:
* Without `--repair` nothing in the directory is changed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.support.common import print_error
from mansio.cli.support.formatting import Output, OutputOption, show_json, show_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.broker.maintenance.data_check import DataCheckReport, PartitionReport
    from mansio.storage.inspection import Finding, LogReport

DAMAGED_EXIT_CODE = 1
NOT_CHECKED_EXIT_CODE = 2
DAMAGE_MAP_CELLS = 60
DAMAGE_MAPS_MAX = 50
FINDINGS_SHOWN_MAX = 1000

MISSING_FILE = "missing"
"""Value of `Finding.what` for a missing file that can be rebuilt from the records."""

GOOD, DAMAGED, TORN = "good", "damaged", "torn"
PLAIN_MAP_CELLS = {GOOD: "=", DAMAGED: "X", TORN: "~"}
COLOURED_MAP_CELLS = {GOOD: ("━", "green"), DAMAGED: ("█", "bold red"), TORN: ("╌", "yellow")}
SEVERITY_STYLES = {"damage": "bold red", "rebuild": "yellow", "note": "dim"}


app = typer.Typer(no_args_is_help=True, help="Check and repair stored data.")


@app.callback()
def command_group() -> None:
    """Check and repair stored data."""


@app.command()
def check(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The data directory of a stopped broker.")],
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Rebuild indexes and other files that are derived from the records; never changes records.",
        ),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check the data directory of a stopped broker: damaged files, their offsets, and the consequences.

    Reads every byte. Exit code 0: no damage (indexes that a killed broker did not write are rebuilt at the next start);
    1: damage; 2: the directory could not be checked.
    """
    from mansio.errors import StorageError

    try:
        diagnosis = _check_with_progress(directory, repair)
    except StorageError as error:
        print_error(_failure_message(error, directory))
        raise typer.Exit(NOT_CHECKED_EXIT_CODE) from None
    except OSError as error:
        print_error(f"cannot check {directory}: {error}")
        raise typer.Exit(NOT_CHECKED_EXIT_CODE) from None
    if output is Output.JSON:
        show_json(_as_json(diagnosis))
    else:
        _print_report(diagnosis)
    raise typer.Exit(0 if is_undamaged(diagnosis) else DAMAGED_EXIT_CODE)


def is_undamaged(diagnosis: DataCheckReport) -> bool:
    """Whether the directory has no damage: a broker opens it without loss, and rebuilds all missing files itself."""
    if diagnosis.is_clean:
        return True
    left_out = any(one.log.omitted_finding_count for one in diagnosis.partitions)
    return not left_out and all(
        finding.severity == "note" or finding.repaired or _is_rebuilt_by_broker(finding)
        for finding in diagnosis.all_findings()
    )


def _is_rebuilt_by_broker(finding: Finding) -> bool:
    """Whether the finding is a missing file that a broker creates again. A checkpoint is not one of these files:
    without it the durable end of the log is unknown, and a killed broker does not lose it."""
    is_missing = finding.severity == "rebuild" and finding.what == MISSING_FILE and not finding.repaired
    return is_missing and not finding.path.endswith("/checkpoint")


def _check_with_progress(directory: str, repair: bool) -> DataCheckReport:
    from mansio.broker.maintenance.data_check import NO_PROGRESS, ProgressCallbacks, check_data_directory
    from mansio.host.disk import HostDisk

    disk = HostDisk()
    if not sys.stderr.isatty():
        return check_data_directory(disk, directory, repair=repair, progress=NO_PROGRESS)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("reading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("reading", total=None)
        reporter = ProgressCallbacks(
            on_total_bytes=lambda count: bars.update(task, total=count),
            on_read_bytes=lambda count: bars.advance(task, count),
        )
        return check_data_directory(disk, directory, repair=repair, progress=reporter)


def _failure_message(error: Exception, directory: str) -> str:
    from mansio.errors import DataDirectoryLocked

    if isinstance(error, DataDirectoryLocked):
        return f"a broker runs on {directory}: stop it first ({error})"
    return str(error)


# -- JSON output --------


def _as_json(diagnosis: DataCheckReport) -> dict[str, Any]:
    return {
        "data_dir": diagnosis.data_dir,
        "clean": is_undamaged(diagnosis),
        "findings": [_finding_json(finding) for finding in diagnosis.findings],
        "partitions": [
            {
                "topic": one.topic,
                "partition": one.partition,
                "directory": one.log.directory,
                "start_offset": one.log.start_offset,
                "end_offset": one.log.end_offset,
                "segments": one.log.segment_count,
                "batches": one.log.batch_count,
                "size_bytes": one.log.size_bytes,
                "damaged_records": one.log.damaged_offset_count,
                "findings": [_finding_json(finding) for finding in one.log.findings],
                "findings_left_out": one.log.omitted_finding_count,
                "bad_ranges": [damaged_range._asdict() for damaged_range in one.log.bad_ranges],
            }
            for one in diagnosis.partitions
        ],
        "topics": _topic_rows(diagnosis.partitions),
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    shown = finding._asdict()
    for name in ("first_offset", "end_offset", "position"):
        if shown[name] < 0:
            shown[name] = None
    return shown


def _topic_rows(partitions: Iterable[PartitionReport]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for one in partitions:
        row = rows.setdefault(
            one.topic,
            dict.fromkeys(
                ("partitions", "segments", "batches", "size_bytes", "damaged_partitions", "damaged_records"),
                0,
            ),
        )
        row["partitions"] += 1
        row["segments"] += one.log.segment_count
        row["batches"] += one.log.batch_count
        row["size_bytes"] += one.log.size_bytes
        row["damaged_partitions"] += one.log.has_damage
        row["damaged_records"] += one.log.damaged_offset_count
    return [{"topic": topic, **row} for topic, row in sorted(rows.items())]


# -- text output --------


def _print_report(diagnosis: DataCheckReport) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    shown = 0
    sound = is_undamaged(diagnosis)
    rebuilt_count = sum(map(_is_rebuilt_by_broker, diagnosis.all_findings()))
    for finding in sorted(diagnosis.all_findings(), key=_severity_sort_key):
        if sound and _is_rebuilt_by_broker(finding):
            continue
        if shown < FINDINGS_SHOWN_MAX:
            console.print(_finding_line(finding, diagnosis.data_dir))
        shown += 1
    left_out = max(shown - FINDINGS_SHOWN_MAX, 0)
    left_out += sum(one.log.omitted_finding_count for one in diagnosis.partitions)
    if left_out:
        console.print(f"and {left_out:,} more findings")
    damaged = [one for one in diagnosis.partitions if one.log.bad_ranges]
    if damaged:
        width = max(len(f"{one.topic}-{one.partition}") for one in damaged[:DAMAGE_MAPS_MAX])
        cells = _map_cells(console.is_terminal)
        legend = "   ".join(f"{cells[state][0]} {state}" for state in (GOOD, DAMAGED, TORN))
        console.print(Text(f"\n{legend}   (one line per partition, from its first byte to its last)"))
    for one in damaged[:DAMAGE_MAPS_MAX]:
        console.print(
            Text(f"{one.topic}-{one.partition}".ljust(width) + "  ")
            + _damage_map_text(one.log, console.is_terminal)
        )
    rows = _topic_rows(diagnosis.partitions)
    if rows:
        console.print()
        columns = (
            "topic",
            "partitions",
            "segments",
            "batches",
            "size_bytes",
            "damaged_partitions",
            "damaged_records",
        )
        show_table(
            columns,
            [[f"{row[name]:,}" if name != "topic" else row[name] for name in columns] for row in rows],
        )
    if sound and rebuilt_count:
        console.print(
            f"\nok: {rebuilt_count:,} missing indexes (or leader epochs) are rebuilt by the broker."
        )
    console.print("\nNo damage found." if sound else "\nDamage found: see above.")


def _severity_sort_key(finding: Finding) -> tuple[int, str, int]:
    return list(SEVERITY_STYLES).index(finding.severity), finding.path, finding.position


def _finding_line(finding: Finding, data_dir: str) -> Any:
    from rich.text import Text

    from mansio.logs import escaped

    path = escaped(finding.path.removeprefix(data_dir + "/"))
    text = Text.assemble(
        (finding.severity.upper().ljust(8), SEVERITY_STYLES[finding.severity]),
        f"{path}: {escaped(finding.what)}; {escaped(finding.meaning)}",
    )
    if finding.repaired:
        text.append(f" [{finding.repaired}]", "green")
    return text


def _map_cells(terminal: bool) -> dict[str, tuple[str, str]]:
    return COLOURED_MAP_CELLS if terminal else {state: (cell, "") for state, cell in PLAIN_MAP_CELLS.items()}


def damage_map(log: LogReport, cells: int = DAMAGE_MAP_CELLS) -> list[str]:
    """Return the state of each of `cells` equal parts of a log: `damaged` if it contains damaged bytes, else `torn` if
    it contains a torn tail, else `good`.
    """
    states = [GOOD] * cells
    size = max(log.size_bytes, 1)
    for damaged_range in log.bad_ranges:
        first = min(damaged_range.start * cells // size, cells - 1)
        last = min(max(damaged_range.end - 1, damaged_range.start) * cells // size, cells - 1)
        for cell in range(first, last + 1):
            if not damaged_range.torn:
                states[cell] = DAMAGED
            elif states[cell] == GOOD:
                states[cell] = TORN
    return states


def _damage_map_text(log: LogReport, terminal: bool) -> Any:
    from rich.text import Text

    cells = _map_cells(terminal)
    return Text.assemble(*(cells[state] for state in damage_map(log)))
