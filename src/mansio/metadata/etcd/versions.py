"""Versions of etcd that may store metadata.

The versions 3.5.0 to 3.5.2 can lose acknowledged changes or become inconsistent after a crash; they are rejected.
3.4.x and 3.5.3 to 3.5.12 lack less important fixes; they are accepted with a warning. Versions before 3.4 do not
support progress requests of a watch; they are rejected.

Source: https://etcd.io/docs/v3.5/op-guide/data_corruption/ and the advisory of April 2022 on 3.5.0-3.5.2
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

OLDEST_SUPPORTED: Final = (3, 4, 0)
FIRST_CORRUPTING: Final = (3, 5, 0)
LAST_CORRUPTING: Final = (3, 5, 2)
OLDEST_RECOMMENDED: Final = (3, 5, 13)

_VERSION: Final = re.compile(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})")


class VersionSupport(Enum):
    """Support of an etcd version: `GOOD`, `OLD` (accepted with a warning) or `REFUSED`."""

    GOOD = auto()
    OLD = auto()
    REFUSED = auto()


def version_support(version: str) -> VersionSupport:
    """Support of an etcd version, for example "3.5.13" or "3.6.0-rc.1". A malformed version is `REFUSED`."""
    found = _VERSION.match(version)
    if found is None:
        return VersionSupport.REFUSED
    number = (int(found[1]), int(found[2]), int(found[3]))
    if number < OLDEST_SUPPORTED or FIRST_CORRUPTING <= number <= LAST_CORRUPTING:
        return VersionSupport.REFUSED
    return VersionSupport.GOOD if number >= OLDEST_RECOMMENDED else VersionSupport.OLD
