"""Release dates of the servers, read from what was installed: no date is written down here that could become wrong.

* Debian packages: the first entry of the package's changelog for the upstream version. It is some days after the
  release; later entries for the same version are Debian's corrections.
* Jars: the time of their manifest, which is that of the build.
* Go modules: the time of the version, as the module proxy tells it (`tools/peer_servers.sh` keeps that file).
"""

from __future__ import annotations

import gzip
import json
import re
import zipfile
from datetime import date, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from bench.peers.peer import TOOLS

DOCUMENTATION = (TOOLS / "root/usr/share/doc", Path("/usr/share/doc"))
ENTRY = re.compile(r"^\S+ \((?:\d+:)?([^)]+)\).*?^ -- .*?>  (.+?)$", re.DOTALL | re.MULTILINE)
"""An entry of a Debian changelog: the version without its epoch, and the date."""
MANIFEST = "META-INF/MANIFEST.MF"
DAYS_OF_YEAR = 365.25


def of_debian(package: str, version: str) -> date | None:
    """When a Debian package of this upstream version first appeared. `package` may be a pattern. None if the changelog
    is not installed or does not name the version."""
    for directory in DOCUMENTATION:
        for path in sorted(directory.glob(f"{package}/changelog.Debian.gz"), reverse=True):
            with gzip.open(path, "rt", errors="replace") as changelog:
                entries = ENTRY.findall(changelog.read())
            dates = [when for found, when in entries if found.rpartition("-")[0] == version]
            if dates:
                return parsedate_to_datetime(dates[-1]).date()
    return None


def of_jar(path: Path) -> date:
    """When a jar was built."""
    with zipfile.ZipFile(path) as jar:
        return date(*jar.getinfo(MANIFEST).date_time[:3])


def of_go_module(path: Path) -> date | None:
    """When the version of a Go module was made, from the module proxy's `.info`; None if there is no such file."""
    if not path.exists():
        return None
    return datetime.fromisoformat(json.loads(path.read_text())["Time"]).date()


def age(released: date | None, today: date) -> str:
    """The date with the age in years, for people."""
    if released is None:
        return "release date unknown"
    return f"{released.isoformat()}, {(today - released).days / DAYS_OF_YEAR:.1f} years old"
