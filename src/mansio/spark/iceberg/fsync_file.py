"""Files and their names, to the disk. Apart from what a catalog needs, because tasks that write files do without that.

Always true: an error is raised, never swallowed.
"""

from __future__ import annotations

import os


def fsync_directory_entry(path: str) -> None:
    """The directory entry of a file, to the disk."""
    descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: str) -> None:
    """A file that somebody else has written and closed, and its name, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fsync_directory_entry(path)
