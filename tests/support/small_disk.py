"""A file system of a few megabytes that can be filled without root: a tmpfs in a mount namespace of its own.

Owns a process that keeps the namespace alive. A broker started with `command` has the file system at `path`; the
test accesses it through `outside`. It exists until `close`: a broker on it may be killed and started again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

import pytest

from support.paths import mansio_command

_KEEP = 'mount -t tmpfs -o size="$1",mode=700 none "$2" && echo mounted && exec cat'


class SmallDisk:
    """See the module. `size_bytes` are for everything that is put there."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        path.mkdir(parents=True)
        self.path = path
        unshare, nsenter = shutil.which("unshare"), shutil.which("nsenter")
        if unshare is None or nsenter is None:
            pytest.skip("a really full disk needs unshare and nsenter of util-linux")
        self._holder = subprocess.Popen(
            [
                unshare,
                "--user",
                "--map-root-user",
                "--mount",
                "sh",
                "-c",
                _KEEP,
                "sh",
                str(size_bytes),
                str(path),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"mounted\n":
            self.close()
            pytest.skip(
                "this system allows no user namespaces with mounts, so no disk can be filled for real"
            )
        pid = str(self._holder.pid)
        self.command = [
            nsenter,
            "--target",
            pid,
            "--user",
            "--mount",
            "--preserve-credentials",
            *mansio_command(),
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the file system with its content."""
        self._holder.communicate()

    @property
    def outside(self) -> Path:
        """Path of the same directory for the test process."""
        return Path(f"/proc/{self._holder.pid}/root{self.path}")

    def fill(self) -> None:
        """Fill the file system completely."""
        with (self.outside / "filler").open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def free(self) -> None:
        """Free the space that `fill` took."""
        os.unlink(self.outside / "filler")
