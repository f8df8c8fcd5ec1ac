"""Commit from which this installation was built: the build wrote it into a file; in a checkout git knows it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

GIT_S_MAX: Final = 10.0


def build_commit() -> str:
    """Return the abbreviated commit, with "-dirty" if a file differs from it; empty if it is unknown."""
    package = Path(__file__).parents[2]
    try:
        return (package / "commit.txt").read_text().strip()
    except OSError:
        return commit_of_checkout(package.parents[1])


def commit_of_checkout(root: Path) -> str:
    """Return the abbreviated commit of a checkout as `build_commit` does; empty without a checkout or git."""
    import subprocess  # takes longer to import than everything else here

    if not (root / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(  # noqa: S603  # a constant command
            command,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=GIT_S_MAX,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()
