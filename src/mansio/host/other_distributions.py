"""Other distributions that have installed files into the package `mansio`.

The distribution of this package is `mansio-mq`. Releases before 0.2 were distributed as `mansio`, which is another
project on the package index. pip does not notice that two distributions have files of one package: the later one
overwrites files of the first, and removing either removes files of both.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Final

DISTRIBUTION: Final = "mansio-mq"
_OWN_FILE: Final = re.compile(r"^mansio/", re.MULTILINE)


def other_distributions() -> list[str]:
    """Return name and version of each other installed distribution with files in the package, sorted. Reads the file
    lists of all installed distributions, which takes some milliseconds."""
    found = set()
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.sub(r"[-_.]+", "-", name).lower() == DISTRIBUTION:
            continue
        if _OWN_FILE.search(distribution.read_text("RECORD") or ""):
            found.add(f"{name} {distribution.version}")
    return sorted(found)


def remedy(others: list[str]) -> str:
    """Return a line that names the other distributions and what to do."""
    names = " ".join(each.partition(" ")[0] for each in others)
    return (
        f"{', '.join(others)} has files in the package mansio, too: run `pip uninstall {names} {DISTRIBUTION}`, then"
        f" install {DISTRIBUTION} again"
    )
