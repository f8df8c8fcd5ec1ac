"""`mansio doctor`: checks of the environment in which brokers, clients and Spark jobs run.

Checks Python and its build, the packages of each extra, the default ports, free space and flush time of the data
directory's disk, limits of the process, Java, etcd, whether a broker answers (if not, which of name, port, protocol,
certificate, user or password is wrong), the health of each broker of its cluster,
and whether that has transactions that hang. Changes nothing but one temporary file, which the flush check writes and
removes. With `--spark`, checks a Spark cluster instead. With `--job`, checks the rights of its user for a pipeline
job, too. `mansio data check DIR` examines stored data.

Exit codes: 0 no problem, 1 at least one problem. A missing optional part is a note, not a problem.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from mansio.cli.support.common import CONNECT_TIMEOUT_MS, connect, current_addresses, run
from mansio.cli.support.formatting import Output, OutputOption, show_json, show_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mansio.client.admin.cluster import BrokerHealth
    from mansio.net.security_settings import SecuritySettings
    from mansio.spark.cluster.problems import PythonReport

KAFKA_PORT: Final = 9092
HTTP_PORT: Final = 9080
DEFAULT_DATA_DIR: Final = "mansio-data"
PROBLEM_EXIT_CODE: Final = 1
MEASURED_FLUSHES: Final = 20
MEASURED_FLUSH_BYTES: Final = 4096
SLOW_FLUSH_MS: Final = 20.0
"""Flush time above which the check reports a note: a request with acks=all waits for at least one flush."""
TRANSACTIONS_TIMEOUT_S: Final = 15.0
DISK_FULL_BYTES: Final = 64 << 20
"""Free space below which a disk counts as full: one segment of a new log and the metadata need about that."""
DISK_LOW_FRACTION: Final = 0.05
"""Fraction of the disk's size: with less free space the check reports a note."""
SESSION_NOT_HELD: Final = "session_not_held"
OPEN_FILES_MIN: Final = 65_536
VOLATILE_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs"})


class Status(StrEnum):
    """Outcome of one check."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: a line of the report."""

    name: str
    status: Status
    detail: str


def doctor(
    data: Annotated[
        str,
        typer.Option("--data", metavar="DIR", help="Directory whose disk is measured."),
    ] = DEFAULT_DATA_DIR,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: Annotated[
        str,
        typer.Option(
            "--bootstrap-servers",
            "-b",
            envvar="MANSIO_BOOTSTRAP_SERVERS",
            metavar="HOST:PORT",
            help="Brokers that must answer; by default those of the current context, without one 127.0.0.1:9092, which"
            " may be unreachable.",
        ),
    ] = "",
    spark: Annotated[
        bool,
        typer.Option(
            "--spark",
            help="Check only a Spark cluster (--master or --remote): Python and packages on every worker, and whether"
            " the workers reach the brokers (--bootstrap-servers) and see the directories (--shared).",
        ),
    ] = False,
    master: Annotated[
        str | None,
        typer.Option(
            "--master", envvar="MANSIO_SPARK_MASTER", metavar="URL", help="Spark master, for --spark."
        ),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(
            "--remote", envvar="SPARK_REMOTE", metavar="URL", help="Spark Connect server, for --spark."
        ),
    ] = None,
    shared: Annotated[
        list[str] | None,
        typer.Option(
            "--shared",
            metavar="DIR",
            help="Directory that driver and workers must share, for --spark; repeatable.",
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="JOB",
            help="Check the rights of this user for a pipeline job, such as archive, run, run-to-topic, replay.",
        ),
    ] = None,
    topics: Annotated[
        list[str] | None,
        typer.Option("--topic", metavar="TOPIC", help="Topic that the job reads, for --job; repeatable."),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option("--to", metavar="TOPIC", help="Topic that the job writes, for --job; repeatable."),
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option("--name", metavar="PIPELINE", help="Name of the pipeline, for --job."),
    ] = None,
) -> None:
    """Check the environment: Python, extras, ports, the disk, Java, etcd, and the health of the brokers.

    Exit code 0: no problem; 1: at least one. Missing optional parts are notes. `mansio data check DIR` examines stored
    data.
    """
    if spark:
        checks = check_spark(master, remote, bootstrap_servers, tuple(shared or ()))
    else:
        checks = list(_checks(data, bootstrap_servers))
    if job is not None:
        checks += check_rights(bootstrap_servers, job, topics or (), targets or (), pipeline)
    if output is Output.JSON:
        show_json([asdict(check) for check in checks])
    else:
        show_table(("status", "check", "detail"), [[one.status, one.name, one.detail] for one in checks])
    if any(check.status is Status.PROBLEM for check in checks):
        raise typer.Exit(PROBLEM_EXIT_CODE)


def _checks(data: str, bootstrap_servers: str) -> Iterator[Check]:
    from mansio.host.extras import EXTRAS

    yield check_python()
    yield check_package()
    yield from map(check_extra, EXTRAS)
    yield check_open_files()
    yield check_disk(data)
    yield check_port("Kafka port", KAFKA_PORT, "--kafka")
    yield check_port("HTTP port", HTTP_PORT, "--http")
    yield check_java()
    yield check_etcd()
    bootstrap_servers = bootstrap_servers or current_addresses() or ""
    broker = check_broker(bootstrap_servers)
    yield broker
    if broker.status is Status.OK:
        yield from check_health(bootstrap_servers)
        yield check_transactions(bootstrap_servers)


def check_python() -> Check:
    """Report version and implementation of Python, and check the build: a debug or unoptimized build, or no uvloop, is
    reported as a note."""
    from mansio.version import __version__

    text = f"mansio {__version__}, {platform.python_implementation()} {platform.python_version()}"
    text += f" on {platform.system()} {platform.machine()}, {sys.executable}"
    slow = []
    if sysconfig.get_config_var("Py_DEBUG"):
        slow.append("a debug build")
    elif "-O2" not in (flags := str(sysconfig.get_config_var("PY_CFLAGS") or "")) and "-O3" not in flags:
        slow.append("a build without optimization")
    if importlib.util.find_spec("uvloop") is None and sys.platform != "win32":
        slow.append("no uvloop")
    return Check("Python", Status.NOTE if slow else Status.OK, "; ".join([text, *slow]))


def check_package() -> Check:
    """Check that no other distribution has installed files into the package."""
    from mansio.host.other_distributions import DISTRIBUTION, other_distributions, remedy

    if others := other_distributions():
        return Check("package", Status.PROBLEM, remedy(others))
    return Check("package", Status.OK, f"{DISTRIBUTION} alone has files in the package mansio")


def check_extra(name: str) -> Check:
    """Check whether the packages of an extra are installed."""
    from mansio.host.extras import EXTRAS, missing_extra, missing_modules

    missing = missing_modules(name)
    if missing:
        return Check(f"extra {name}", Status.NOTE, missing_extra(name, missing).message)
    return Check(f"extra {name}", Status.OK, ", ".join(map(_distribution, EXTRAS[name])))


def check_open_files() -> Check:
    """Check the limit of open files: every connection and every segment in use needs a file descriptor."""
    try:
        import resource
    except ImportError:
        return Check("open files", Status.NOTE, "the limit is unknown on this platform")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (-1, resource.RLIM_INFINITY) and hard < OPEN_FILES_MIN:
        return Check(
            "open files", Status.NOTE, f"at most {hard}; raise the limit to {OPEN_FILES_MIN} (ulimit -Hn)"
        )
    return Check("open files", Status.OK, "unlimited" if hard < 0 else f"at most {hard}")


def check_disk(directory: str) -> Check:
    """Check the free space of the disk of `directory`, or of its nearest existing parent, and measure the time of a
    flush (fdatasync) there. A full disk is a problem."""
    from mansio.ports import DISK_FULL_ERRNOS

    existing = os.path.abspath(directory)
    while not os.path.isdir(existing) and os.path.dirname(existing) != existing:
        existing = os.path.dirname(existing)
    try:
        median_ms, slowest_ms = measure_flush_ms(existing)
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            return Check("disk", Status.PROBLEM, f"{existing}: the disk is full ({error.strerror})")
        return Check("disk", Status.PROBLEM, f"cannot write to {existing}: {error.strerror or error}")
    detail = (
        f"{existing}: a flush takes {median_ms:.2f} ms (slowest of {MEASURED_FLUSHES}: {slowest_ms:.2f} ms)"
    )
    free_bytes, size_bytes = _disk_space(existing)
    detail += f", {free_bytes / 1e9:.1f} of {size_bytes / 1e9:.1f} GB free"
    if free_bytes < DISK_FULL_BYTES:
        return Check("disk", Status.PROBLEM, f"{detail}: it is full, and a broker can store nothing")
    kind = file_system_type(existing)
    if kind in VOLATILE_FILE_SYSTEMS:
        return Check("disk", Status.NOTE, f"{detail}; {kind} keeps data in memory: a restart loses it")
    if free_bytes < size_bytes * DISK_LOW_FRACTION:
        return Check("disk", Status.NOTE, f"{detail}: less than {DISK_LOW_FRACTION:.0%}")
    return Check("disk", Status.NOTE if median_ms > SLOW_FLUSH_MS else Status.OK, detail)


def _disk_space(directory: str) -> tuple[int, int]:
    """Free bytes for users other than root, and size in bytes, of the file system of `directory`."""
    size_bytes, _, free_bytes = shutil.disk_usage(directory)
    return free_bytes, size_bytes


def measure_flush_ms(directory: str) -> tuple[float, float]:
    """Median and maximum duration of `MEASURED_FLUSHES` appends of `MEASURED_FLUSH_BYTES` with fdatasync, in
    milliseconds.
    """
    from mansio.host.disk import sync_descriptor

    durations = []
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(MEASURED_FLUSHES):
            file.write(bytes(MEASURED_FLUSH_BYTES))
            began = time.perf_counter()
            sync_descriptor(file.fileno())
            durations.append((time.perf_counter() - began) * 1000)
    durations.sort()
    return durations[len(durations) // 2], durations[-1]


def file_system_type(directory: str) -> str:
    """Return the type of the directory's file system, such as `ext4`; empty if it is unknown."""
    found, longest = "", -1
    path = os.path.realpath(directory)
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            _, mount, kind, *_ = line.split(" ")
            is_above = path == mount or path.startswith(mount.rstrip("/") + "/")
            if is_above and len(mount) > longest:
                found, longest = kind, len(mount)
    return found


def check_port(name: str, port: int, flag: str) -> Check:
    """Check whether a broker could listen on a default port. `flag`: the option that selects another port."""
    import socket

    from mansio.host.port_owner import port_in_use_message

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return Check(
                name, Status.NOTE, f"{port_in_use_message('127.0.0.1', port)}: use {flag} for another one"
            )
    return Check(name, Status.OK, f"127.0.0.1:{port} is free")


def check_java() -> Check:
    """Check whether there is a Java installation that Spark can use."""
    from mansio.spark.session.java import JavaNotFound, find_java

    try:
        java = find_java()
    except JavaNotFound as error:
        return Check("Java", Status.NOTE, error.message)
    return Check("Java", Status.OK, f"{java.version} from {java.source}, {java.home}")


def check_etcd() -> Check:
    """Check whether there is an etcd program, which brokers with `--join` and `mansio dev-cluster` need."""
    from mansio.errors import MansioError

    try:
        from mansio.node.etcd_member.executable import find_program  # fails without the extra `cluster`

        program = find_program()
    except MansioError as error:
        return Check("etcd", Status.NOTE, error.message)
    return Check("etcd", Status.OK, f"{program.version}, {program.path}")


def check_broker(bootstrap_servers: str) -> Check:
    """Check whether a broker responds. If the user gave no address, an unreachable broker is only a note."""
    from mansio.errors import ConfigError, MansioError
    from mansio.net.addresses import DEFAULT_BOOTSTRAP_SERVERS, parse_addresses
    from mansio.net.contexts import resolve_security

    address = bootstrap_servers or DEFAULT_BOOTSTRAP_SERVERS

    async def describe() -> tuple[str, int]:
        async with connect(address) as client:
            cluster = await client.admin.describe_cluster()
            return cluster.cluster_id or "", len(cluster.brokers)

    status = Status.PROBLEM if bootstrap_servers else Status.NOTE
    try:
        security = resolve_security(address)
        cluster_id, brokers = run(describe())
    except ConfigError as error:
        return Check("broker", Status.PROBLEM, f"settings: {error.message}")
    except MansioError as error:
        found = run(find_wrong_part(parse_addresses(address)[0], security))
        return Check(
            "broker", status, error.message if found is None else f"{found.part} wrong: {found.reason}"
        )
    plural = "" if brokers == 1 else "s"
    user = f" as {security.user}" if security.user else ""
    detail = f"{address}: cluster {cluster_id}, {brokers} broker{plural}, {security.protocol}{user}"
    return Check("broker", Status.OK, detail)


class WrongPart(NamedTuple):
    """The part of a connection's settings that is wrong, and why."""

    part: str
    reason: str


async def find_wrong_part(address: tuple[str, int], security: SecuritySettings) -> WrongPart | None:
    """Connect step by step: name, port, protocol and certificate, user and password. Returns the first part that is
    wrong; None if a client can connect to this address."""
    import asyncio

    from mansio.errors import (
        AuthenticationFailed,
        ConnectionLost,
        MansioError,
        TlsFailed,
        UnsupportedSaslMechanism,
    )
    from mansio.net.connection import Connection, ConnectionOptions
    from mansio.net.sasl import offered_mechanisms
    from mansio.net.tls_failures import speaks_tls

    host, port = address
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port)
    except (OSError, UnicodeError):
        return WrongPart("name", f"{host} has no address")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_MS / 1000):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        reason = (
            "nothing listens there" if isinstance(error, ConnectionRefusedError) else "it does not answer"
        )
        return WrongPart("port", f"{host}:{port} ({found[0][4][0]}): {reason}")
    writer.transport.abort()
    options = ConnectionOptions(
        "mansio-doctor", CONNECT_TIMEOUT_MS, CONNECT_TIMEOUT_MS, tls=security.tls_context()
    )
    try:
        connection = await Connection.open(host, port, replace(options, sasl=security.credentials()))
    except TlsFailed as error:
        return WrongPart(error.wrong, error.message)
    except UnsupportedSaslMechanism as error:
        return WrongPart("mechanism", error.message)
    except AuthenticationFailed as error:
        return WrongPart("user or password" if security.user else "token or API key", error.message)
    except MansioError as error:
        # With TLS 1.3 a broker refuses a certificate after the client's handshake, and the reason may be lost.
        is_refused = isinstance(error, ConnectionLost) and security.tls and await speaks_tls(host, port)
        return WrongPart("client certificate" if is_refused else "protocol", error.message)
    try:
        if not security.has_identity:

            async def request(key: int, fields: Mapping[str, Any], version: int) -> Any:
                return await connection.request(key, fields, version=version)

            try:
                mechanisms = await offered_mechanisms(request)
            except MansioError:
                mechanisms = []
            if mechanisms:
                remedy = "give MANSIO_USER and MANSIO_PASSWORD, or a context (mansio context add)"
                return WrongPart(
                    "user", f"{host}:{port} requires one, with {', '.join(mechanisms)}: {remedy}"
                )
    finally:
        await connection.close()
    return None


def check_health(bootstrap_servers: str) -> Iterator[Check]:
    """Check the health of each broker: what makes it not ready is a problem, a warning is a note."""
    from mansio.errors import ClusterAuthorizationFailed, MansioError, UnsupportedVersion
    from mansio.net.addresses import DEFAULT_BOOTSTRAP_SERVERS

    async def read() -> list[BrokerHealth]:
        async with connect(bootstrap_servers or DEFAULT_BOOTSTRAP_SERVERS) as client:
            return await client.admin.cluster.health()

    try:
        found = run(read())
    except MansioError as error:
        yield Check("health", Status.PROBLEM, error.message)
        return
    for one in found:
        name = f"broker {one.node_id}"
        if isinstance(one.error, ClusterAuthorizationFailed):
            yield Check(name, Status.NOTE, "skipped: needs DESCRIBE on the cluster")
            continue
        if one.error is not None:
            is_older = isinstance(one.error, UnsupportedVersion)
            yield Check(name, Status.NOTE if is_older else Status.PROBLEM, one.error.message)
            continue
        since = "" if one.session_lost_at is None else f", since {one.session_lost_at:%Y-%m-%dT%H:%M:%SZ}"
        shown = [
            f"{each.reason}{since if each.reason == SESSION_NOT_HELD else ''}: {each.detail}"
            for each in one.problems
        ]
        if not one.is_session_held and all(each.reason != SESSION_NOT_HELD for each in one.problems):
            shown.append(f"{SESSION_NOT_HELD}{since}")
        yield from (Check(name, Status.PROBLEM, detail) for detail in shown)
        yield from (Check(name, Status.NOTE, f"{each.reason}: {each.detail}") for each in one.warnings)
        if not shown and not one.warnings:
            yield Check(name, Status.OK, "healthy")


def check_transactions(bootstrap_servers: str) -> Check:
    """Check for transactions that hang, which are a problem, and for those that are open for long, which are a note."""
    import asyncio

    from mansio.client.admin.transactions import HANGING_OPEN_MS_MIN
    from mansio.errors import AuthorizationFailed, MansioError
    from mansio.net.addresses import DEFAULT_BOOTSTRAP_SERVERS

    async def look() -> tuple[list[str], list[str]]:
        address = bootstrap_servers or DEFAULT_BOOTSTRAP_SERVERS
        async with asyncio.timeout(TRANSACTIONS_TIMEOUT_S), connect(address) as client:
            transactions = client.admin.transactions
            listed = await transactions.list(open_ms_min=HANGING_OPEN_MS_MIN)
            hanging = await transactions.find_hanging(open_ms_min=HANGING_OPEN_MS_MIN)
        return [each.transactional_id for each in listed], [
            f"{each.topic}-{each.partition} from offset {each.start_offset} on" for each in hanging
        ]

    try:
        old, hanging = run(look())
    except TimeoutError:
        return Check("transactions", Status.NOTE, f"no answer within {TRANSACTIONS_TIMEOUT_S} s")
    except AuthorizationFailed as error:
        return Check("transactions", Status.NOTE, f"skipped: {error.message}")
    except MansioError as error:
        return Check("transactions", Status.NOTE, error.message)
    if hanging:
        more = f" and {len(hanging) - 1} more" if len(hanging) > 1 else ""
        detail = f"one hangs in {hanging[0]}{more}: mansio txn find-hanging"
        return Check("transactions", Status.PROBLEM, detail)
    if old:
        more = f" and {len(old) - 1} more" if len(old) > 1 else ""
        minutes = HANGING_OPEN_MS_MIN // 60_000
        detail = f"open for more than {minutes} minutes: {old[0]!r}{more}"
        return Check("transactions", Status.NOTE, detail)
    return Check("transactions", Status.OK, "none is open for long")


def check_rights(
    bootstrap_servers: str, job: str, topics: Sequence[str], targets: Sequence[str], pipeline: str | None
) -> list[Check]:
    """Check whether the user of this client has the rights that a pipeline job needs. A missing right is a problem,
    with the command that gives it."""
    from mansio.cli.support.common import usage_error
    from mansio.errors import MansioError, UnsupportedVersion
    from mansio.net.addresses import DEFAULT_BOOTSTRAP_SERVERS
    from mansio.net.contexts import resolve_security
    from mansio.pipelines.rights import Job, rights_of

    if job not in tuple(Job):
        usage_error(f"{job!r} is not a job; there are {', '.join(Job)}", "--job")
    rights = rights_of(Job(job), topics, targets, pipeline)
    address = bootstrap_servers or current_addresses() or DEFAULT_BOOTSTRAP_SERVERS

    async def ask() -> list[bool]:
        async with connect(address) as client:
            queries = [(right.operation, right.resource_type, right.name) for right in rights]
            return [each.is_allowed for each in await client.admin.acls.check(queries)]

    try:
        user = resolve_security(address).user or "ANONYMOUS"
        allowed = run(ask())
    except UnsupportedVersion as error:
        return [Check("rights", Status.NOTE, error.message)]
    except MansioError as error:
        return [Check("rights", Status.PROBLEM, error.message)]
    missing = [right for right, is_allowed in zip(rights, allowed, strict=True) if not is_allowed]
    if not missing:
        needed = ", ".join(map(str, rights)) or "no rights"
        return [Check("rights", Status.OK, f"{user} has what {job} needs: {needed}")]
    return [
        Check("rights", Status.PROBLEM, f"{user} lacks {right}: {right.command(f'User:{user}')}")
        for right in missing
    ]


def check_spark(
    master: str | None, remote: str | None, bootstrap_servers: str, shared: tuple[str, ...]
) -> list[Check]:
    """Start a session on a Spark cluster and check it, as the commands of `mansio pipeline` do before a job."""
    from mansio.cli.support.common import usage_error

    if (master is None) == (remote is None):
        usage_error("give one of them with --spark", "--master / --remote")
    from mansio.pipelines.cluster_check import check_cluster
    from mansio.spark.cluster.problems import SharedDirectory
    from mansio.spark.session import session

    running = session(master, "mansio doctor", remote=remote)
    directories = [SharedDirectory("directory", location, "--shared") for location in shared]
    found = check_cluster(running, bootstrap_servers or None, directories)
    if not found.workers and not found.problems:
        return [Check("Spark", Status.OK, f"{master} runs on this machine only: nothing to check")]
    checks = [Check(one.where, Status.PROBLEM, f"{one.what}. {one.remedy}") for one in found.problems]
    for worker in found.workers:
        versions = ", ".join(
            f"{name} {worker.versions[name]}" for name in worker.versions if worker.versions[name]
        )
        detail = f"Python {worker.python}, {versions}" if worker.python else "no usable Python"
        if worker.python:
            detail += _examined_text(worker, bootstrap_servers, shared)
        name = f"worker {_worker_name(worker, found.workers)}"
        checks.append(Check(name, Status.OK if worker.python else Status.PROBLEM, detail))
    return checks


def _worker_name(worker: PythonReport, workers: Sequence[PythonReport]) -> str:
    """Return the host of a worker, with the number of its executor if there are several on the host."""
    if sum(one.host == worker.host for one in workers) == 1:
        return worker.host
    directory = os.path.basename(worker.process_directory.rstrip("/"))
    return f"{worker.host} (executor {directory or '?'})"


def _examined_text(worker: PythonReport, bootstrap_servers: str, shared: tuple[str, ...]) -> str:
    """Return what else was examined from a worker and found in order."""
    parts = []
    if bootstrap_servers and not worker.unreachable:
        parts.append("reaches the brokers")
    if shared and all(one.sees_marker for one in worker.directories.values()):
        parts.append(f"shares {', '.join(shared)}")
    return f"; {', '.join(parts)}" if parts else ""


def _distribution(module: str) -> str:
    import importlib.metadata  # takes a quarter of the time of `mansio --help`

    from mansio.host.extras import DISTRIBUTION_NAMES

    name = DISTRIBUTION_NAMES.get(module, module)
    with suppress(importlib.metadata.PackageNotFoundError):
        return f"{name} {importlib.metadata.version(name)}"
    return f"{name} (version unknown)"
