"""Programs that use Apache Kafka's Java client: its jars, from Maven, and the classes compiled against them."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from support.machine import scaled
from support.paths import ROOT

HERE: Final = Path(__file__).parent
JARS: Final = ROOT / ".tools" / "java-share"
QUICK_JVM: Final = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_POM: Final = HERE / "java_share.pom.xml"
_FETCH_DEADLINE_S: Final = 300


def compiled(program: str, target: Path) -> list[str]:
    """Compile a program of this directory with the JDK that runs it; return the command that starts it.

    Skips the test without a JDK or Maven."""
    missing = [name for name in ("java", "javac", "mvn") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} missing: install openjdk-17-jdk-headless (or newer) and maven")
    mark = JARS / ".fetched"
    JARS.mkdir(parents=True, exist_ok=True)
    with (JARS / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
        if not mark.exists() or mark.stat().st_mtime < _POM.stat().st_mtime:
            command = ["mvn", "--quiet", "--batch-mode", "--file", str(_POM), "dependency:copy-dependencies"]
            where = ["-DincludeScope=runtime", f"-DoutputDirectory={JARS}"]
            subprocess.run([*command, *where], check=True, timeout=scaled(_FETCH_DEADLINE_S))
            mark.touch()
    source = HERE / f"{program}.java"
    command = ["javac", "-cp", f"{JARS}/*", "-d", str(target), str(source)]
    subprocess.run(command, check=True, timeout=scaled(_FETCH_DEADLINE_S))
    return ["java", *QUICK_JVM, "-cp", f"{target}:{JARS}/*", program]
