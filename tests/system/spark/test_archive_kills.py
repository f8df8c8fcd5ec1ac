"""An archive that is killed at every step of its batches, by SIGKILL. Files and catalog are real, there is no JVM."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mansio.iceberg.archive.table import open_table
from support import iceberg_archiver
from support.iceberg import checksum, expected, held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STEPS = range(1, 24)
"""Two batches, of eleven steps each: two data files, manifest, list and metadata, each with its name, and the catalog's
answer."""
OFFSETS = 200
NEVER = 0


@contextmanager
def archiver(warehouse: Path, offsets: int) -> Iterator[Callable[[int], str]]:
    """`run(step)`: an archive that dies at a step; how it ended."""
    tests = str(Path(iceberg_archiver.__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-m", "support.iceberg_archiver", str(warehouse), str(offsets)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH")))),
        },
    )
    assert process.stdin is not None
    assert process.stdout is not None
    given, output = process.stdin, process.stdout

    def run(step: int) -> str:
        given.write(f"{step}\n")
        given.flush()
        return output.readline().strip()

    with process:
        yield run
        given.close()


def check(warehouse: Path, offsets: int) -> None:
    """The table has the whole log, each record once."""
    rows = held(open_table(None, str(warehouse), iceberg_archiver.TOPIC))
    want = expected(dict.fromkeys(range(iceberg_archiver.PARTITIONS), offsets))
    assert len(rows) == len(want)
    assert checksum(rows) == checksum(want)


@pytest.mark.full
def test_archive_killed_at_every_step_of_a_batch_has_every_record_once(tmp_path: Path) -> None:
    with archiver(tmp_path, OFFSETS) as run:
        assert [run(step) for step in STEPS] == ["killed"] * len(STEPS)
        assert run(NEVER) == "ended 0"
    check(tmp_path, OFFSETS)
