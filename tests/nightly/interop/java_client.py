"""Programs that use Apache Kafka's Java libraries: jars from Maven, classes compiled against them, and processes."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Final

import pytest

from support.machine import scaled
from support.paths import ROOT

HERE: Final = Path(__file__).parent
QUICK_JVM: Final = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_FETCH_DEADLINE_S: Final = 600
_ANSWER_DEADLINE_S: Final = 90.0


def fetched(name: str) -> Path:
    """Return the directory of the jars that `NAME.pom.xml` of this directory names; Maven brings them once.

    Skips the test without a JDK or Maven."""
    missing = [program for program in ("java", "javac", "mvn") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} missing: install openjdk-17-jdk-headless (or newer) and maven")
    pom = HERE / f"{name}.pom.xml"
    jars = ROOT / ".tools" / name.replace("_", "-")
    mark = jars / ".fetched"
    jars.mkdir(parents=True, exist_ok=True)
    with (jars / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
        if not mark.exists() or mark.stat().st_mtime < pom.stat().st_mtime:
            command = ["mvn", "--quiet", "--batch-mode", "--file", str(pom), "dependency:copy-dependencies"]
            where = ["-DincludeScope=runtime", f"-DoutputDirectory={jars}"]
            subprocess.run([*command, *where], check=True, timeout=scaled(_FETCH_DEADLINE_S))
            mark.touch()
    return jars


def compiled(program: str, target: Path, jars: str = "java_share") -> list[str]:
    """Compile a program of this directory with the JDK that runs it; return the command that starts it.

    `jars`: the POM whose jars it uses. Skips the test without a JDK or Maven."""
    libraries = fetched(jars)
    source = HERE / f"{program}.java"
    command = ["javac", "-cp", f"{libraries}/*", "-d", str(target), str(source)]
    subprocess.run(command, check=True, timeout=scaled(_FETCH_DEADLINE_S))
    return ["java", *QUICK_JVM, "-cp", f"{target}:{libraries}/*", program]


class Conversation:
    """A program that answers each line with one line, "ok ..." or "error ...", before a deadline."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def say(self, line: str) -> str:
        """Send one line and return the answer; the empty string when the process is gone or missed the deadline."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(scaled(_ANSWER_DEADLINE_S), process.kill)
        watch.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()
        finally:
            watch.cancel()

    def ask(self, line: str) -> str:
        """Send one line and return what follows "ok"; raise `AssertionError` for another answer."""
        answer = self.say(line)
        word, _, rest = answer.partition(" ")
        assert word in ("ok", "closed"), f"{line}: {answer or 'no answer'}"
        return rest

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(scaled(_ANSWER_DEADLINE_S))
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
