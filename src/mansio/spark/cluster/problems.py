"""Problems of a Spark cluster, found by comparing the workers' reports with the driver's.

Invariants:
* The functions of this module read no files and ask no other process.
* Workers with the same problem share one line, which ends with the remedy.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

DOCUMENT: Final = "docs/how-to/spark-cluster.md"
HOSTS_SHOWN_MAX: Final = 3
MARKER_PREFIX: Final = ".mansio-check-"
"""Beginning of the names of files that the check creates."""
PYARROW_MAJOR_MIN: Final = 18
TASK_MODULE: Final = "mansio.spark.source.task_reader"
"""Module of Mansio that imports everything that a task needs."""
MODULES: Final = ("pyspark", "pyarrow", "numpy", "mansio", TASK_MODULE)
"""Modules that the probe imports, in this order."""


class ClusterNotReady(MansioError):
    """The check of a Spark cluster found problems; the message has one line for each."""

    def __init__(self, problems: Sequence[ClusterProblem]) -> None:
        super().__init__("\n".join(problem.line for problem in problems))
        self.problems: tuple[ClusterProblem, ...] = tuple(problems)


@dataclass(frozen=True, slots=True)
class ClusterProblem:
    """One problem of a cluster: where it is, what is wrong, and what to do."""

    where: str
    what: str
    remedy: str

    @property
    def line(self) -> str:
        """The problem in one line."""
        return f"{self.where}: {self.what}. {self.remedy}"


@dataclass(frozen=True, slots=True)
class SharedDirectory:
    """A directory that driver and workers use. `option`: the option that names another one."""

    name: str
    location: str
    option: str


@dataclass(frozen=True, slots=True)
class DirectoryReport:
    """What one worker found in a shared directory."""

    sees_marker: bool
    written: str = ""
    """Name of the file that the worker has written."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class PythonReport:
    """What the probe found on one worker, or on the driver. `executable`: empty if there is no such Python."""

    host: str
    executable: str = ""
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    unreachable: Mapping[str, str] = field(default_factory=dict)
    directories: Mapping[str, DirectoryReport] = field(default_factory=dict)
    failure: str = ""
    """The last line of output of a Python that could not run the probe."""
    process_directory: str = ""
    """Working directory of the process; with the host it identifies an executor."""

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> PythonReport:
        """Return the report from the probe's JSON."""
        directories = {
            one["location"]: DirectoryReport(one["sees_marker"], one["written"], one["error"])
            for one in found["directories"]
        }
        names = ("host", "executable", "python", "versions", "failures", "unreachable", "process_directory")
        return cls(**{name: found[name] for name in names}, directories=directories)

    @property
    def python_minor(self) -> str:
        """The version of Python without its last number, such as `3.11`."""
        return ".".join(self.python.split(".")[:2])


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the workers are compared with."""

    driver: PythonReport
    python: str
    """The command that starts a Python worker, as in PYSPARK_PYTHON."""
    brokers: Mapping[str, int] = field(default_factory=dict)
    """Id of each broker by its advertised address."""
    directories: tuple[SharedDirectory, ...] = ()
    seen_by_driver: frozenset[str] = frozenset()
    """Names of the files of workers that the driver sees in the shared directories."""


def local_path(location: str) -> str:
    """Return the path of a location that is a path or a `file:` address; other addresses are returned unchanged."""
    if location.startswith("file:"):
        path = location.removeprefix("file:")
        return "/" + path.lstrip("/")
    return location if "://" in location else os.path.abspath(location)


def find_problems(
    workers: Iterable[PythonReport], expected: Expectation, where: str = "worker"
) -> tuple[ClusterProblem, ...]:
    """Return the problems of all workers, each once. `where`: what the reports are of, in the singular."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for worker in workers:
        for found in _problems_of(worker, expected):
            hosts.setdefault(found, []).append(worker.host)
    return tuple(
        ClusterProblem(describe_hosts(names, where), what, remedy) for (what, remedy), names in hosts.items()
    )


def describe_hosts(hosts: Sequence[str], where: str = "worker") -> str:
    """Return the hosts as text, such as `3 workers (a, b, c)`."""
    names = sorted(set(hosts))
    shown = ", ".join(names[:HOSTS_SHOWN_MAX]) + (", ..." if len(names) > HOSTS_SHOWN_MAX else "")
    return f"{where} {shown}" if len(hosts) == 1 else f"{len(hosts)} {where}s ({shown})"


def _problems_of(worker: PythonReport, expected: Expectation) -> Iterator[tuple[str, str]]:
    """Yield (what is wrong, remedy) for one worker. Problems that follow from an earlier one are left out."""
    driver = expected.driver
    if not worker.executable:
        yield (
            (f"{expected.python} (PYSPARK_PYTHON) cannot be started"),
            f"Set PYSPARK_PYTHON to a Python {driver.python_minor} with mansio that exists there, or send one with"
            f" --archives ({DOCUMENT})",
        )
        return
    if worker.failure:
        yield (
            f"{expected.python} failed: {worker.failure}",
            f"Set PYSPARK_PYTHON to another Python {driver.python_minor} ({DOCUMENT})",
        )
        return
    if worker.python_minor != driver.python_minor:
        yield (
            f"{worker.executable} is Python {worker.python}, and the driver has {driver.python}",
            f"Set PYSPARK_PYTHON to a Python {driver.python_minor} with mansio that exists there ({DOCUMENT})",
        )
    else:
        yield from _package_problems(worker, driver)
    for address, reason in sorted(worker.unreachable.items()):
        yield (
            f"broker {expected.brokers.get(address, '')} does not answer at its advertised address {address}"
            f" ({reason})",
            "Set advertised_listeners of the broker to an address that the workers reach, or open the port",
        )
    for directory in expected.directories:
        yield from _directory_problems(
            directory, worker.directories.get(directory.location), expected.seen_by_driver
        )


def _package_problems(worker: PythonReport, driver: PythonReport) -> Iterator[tuple[str, str]]:
    version = driver.versions.get("mansio", "")
    install = (
        f"Run `pip install 'mansio_mq-{version}-py3-none-any.whl[spark]'` for that Python, or set PYSPARK_PYTHON to one"
        f" that has it, or send one with --archives ({DOCUMENT})"
    )
    missing = [name for name in MODULES if name in worker.failures]
    absent = [name for name in missing if _is_absent(name, worker.failures[name])]
    if absent:
        yield f"{worker.executable} has no {', '.join(absent)}", install
        return
    if missing:
        name = missing[0]
        yield f"{worker.executable} cannot import {name} ({worker.failures[name]})", install
        return
    for name in ("pyspark", "mansio"):
        theirs, ours = worker.versions.get(name, ""), driver.versions.get(name, "")
        if theirs != ours:
            yield (
                f"{name} is {theirs or 'missing'}, and the driver has {ours}",
                "Install the same version on both"
                if name == "mansio"
                else f"Install pyspark=={theirs} for the driver, or use a cluster with Spark {ours}",
            )
    arrow = worker.versions.get("pyarrow", "")
    major = re.match(r"\d+", arrow)
    if major is not None and int(major[0]) < PYARROW_MAJOR_MIN:
        yield f"pyarrow {arrow} is too old", f"Install pyarrow {PYARROW_MAJOR_MIN} or newer"


def _is_absent(name: str, failure: str) -> bool:
    """Whether an import failed because the package itself is missing, not one that it imports."""
    return failure == f"No module named '{name}'"


def _directory_problems(
    directory: SharedDirectory, found: DirectoryReport | None, seen_by_driver: frozenset[str]
) -> Iterator[tuple[str, str]]:
    name = f"the {directory.name} {directory.location}"
    share = f"Name one that driver and workers share ({directory.option}), on a network file system or object store"
    if found is None:
        return
    if found.error:
        yield f"{name} cannot be used ({found.error})", f"Give the workers access, or: {share}"
    elif not found.sees_marker:
        yield f"{name} is another directory there than on the driver, or does not exist", share
    elif found.written and found.written not in seen_by_driver:
        yield f"what a worker writes to {name} is not visible to the driver", share
