"""The bytes on disk are those of docs/internals/file-format.md, version 1, and stay compatible with released versions.

`MANSIO_WRITE_GOLDEN=1` rewrites the golden files; that is a change of format and needs a new version number.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mansio.host.clock import HostClock
from mansio.host.disk import HostDisk
from mansio.storage.log import Log, LogSettings
from mansio.testing.disk import SimulatedDisk
from support.logs import ManualClock, append, check_contents, make_batch

GOLDEN = Path(__file__).parents[2] / "golden" / "log" / "v1"
SETTINGS = LogSettings(segment_bytes=400, index_interval_bytes=100)


def build() -> tuple[dict[str, bytes], list[bytes]]:
    """The files of a log of three segments and two leader epochs, trimmed to offset 1, and its batches."""
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), "/data/p", SETTINGS)
    stored = [
        append(log, make_batch([1000 + n, 1005 - n], 30, n), leader_epoch=2 + n // 4)[1] for n in range(7)
    ]
    log.trim_to(1)
    log.close()
    return {path.rpartition("/")[2]: data for path, data in disk.files().items()}, stored


def test_log_files_match_the_golden_files() -> None:
    files, _ = build()
    if os.environ.get("MANSIO_WRITE_GOLDEN"):
        GOLDEN.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (GOLDEN / name).write_bytes(data)
    golden = {path.name: path.read_bytes() for path in GOLDEN.iterdir()}
    assert files.keys() == golden.keys()
    for name, data in files.items():
        assert data == golden[name], name


def test_the_golden_files_are_opened_and_read(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "p")
    log = Log.open(HostDisk(), HostClock(), str(tmp_path / "p"), SETTINGS)
    assert (log.start_offset, log.end_offset) == (1, 14)
    assert log.recovery.checked_bytes == 0
    assert log.leader_epochs.entries() == [(2, 0), (3, 8)]
    check_contents(log, build()[1])
    log.verify()
    log.close()
