"""Versions of etcd that may store metadata.

3.5.0 to 3.5.2 can lose acknowledged changes or become inconsistent after a crash; they are rejected. Later versions
before 3.5.13, and 3.4, lack less important fixes; they are accepted with a warning. Before 3.4 a watch has no progress
requests.

Source: https://etcd.io/docs/v3.5/op-guide/data_corruption/ and the advisory of April 2022 on 3.5.0-3.5.2
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

OLDEST: Final = (3, 4, 0)
CORRUPTS_FROM: Final = (3, 5, 0)
CORRUPTS_TO: Final = (3, 5, 2)
RECOMMENDED_FROM: Final = (3, 5, 13)

_VERSION: Final = re.compile(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})")


class VersionSupport(Enum):
    """Support of an etcd version."""

    GOOD = auto()
    OLD = auto()
    REFUSED = auto()


def version_support(version: str) -> VersionSupport:
    """Support of a version (`3.5.13`, `3.6.0-rc.1`). A malformed version is `REFUSED`."""
    found = _VERSION.match(version)
    if found is None:
        return VersionSupport.REFUSED
    number = (int(found[1]), int(found[2]), int(found[3]))
    if number < OLDEST or CORRUPTS_FROM <= number <= CORRUPTS_TO:
        return VersionSupport.REFUSED
    return VersionSupport.GOOD if number >= RECOMMENDED_FROM else VersionSupport.OLD
