"""`mansio` on a disk that fails on demand: `python faulty_serve.py FAULTS serve ...`.

FAULTS is a file that the test writes: a line `sync EIO /bad.` makes every sync of a file with `/bad.` in its path fail
with EIO, from then on until the line is gone. The operations are those of `DiskFile`.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mansio.cli.main import main
from mansio.host.disk import HostDisk, HostFile

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATIONS = ("sync", "write_at", "read_at", "truncate")


def faulty(faults: Path, operation: str, true: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: HostFile, *arguments: Any) -> Any:
        for line in faults.read_text().splitlines():
            kind, code, part = line.split(maxsplit=2)
            if kind == operation and part in self.path:
                number = getattr(errno, code)
                raise OSError(number, os.strerror(number), self.path)
        return true(self, *arguments)

    return call


if __name__ == "__main__":
    faults_file = Path(sys.argv.pop(1))
    for name in OPERATIONS:
        setattr(HostFile, name, faulty(faults_file, name, getattr(HostFile, name)))
    HostDisk.sync_all = lambda self, path: False  # files are synced one by one
    main()
