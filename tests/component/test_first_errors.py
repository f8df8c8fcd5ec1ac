"""Common mistakes of new users: each error is one line that names the cause and the remedy."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
import traceback
from datetime import datetime
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.cli.broker import doctor
from mansio.cli.main import main
from mansio.errors import ConfigError, ConnectionLost, DataDirectoryLocked, InvalidRequest
from mansio.spark import options
from support.machine import scaled
from support.tiers import smoke_first

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MISSING = "mansio: topic missing: there is no such topic; create it or correct the name"
HINT = "start a broker with `mansio serve`, or give the address of one as bootstrap servers"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with mansio.Broker(tmp_path_factory.mktemp("broker") / "data", auto_create_topics_enable=False) as one:
        with mansio.blocking.connect(one.address) as client:
            client.admin.create_topic("orders", partitions=2)
        yield one


@contextlib.contextmanager
def used_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def errors_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and standard error of a command, which ends with a newline."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr().err
    assert captured.endswith("\n")
    return int(end.value.code or 0), captured[:-1]


def serve(*arguments: str, directory: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "mansio.cli.main", "serve", *arguments],
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=scaled(30),
        check=False,
    )
    assert done.stderr.endswith("\n")
    return done.returncode, done.stderr[:-1]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["topic", "create", "orders"], "mansio: topic 'orders' already exists"),
        (
            ["topic", "create", "a b"],
            "mansio: topic name 'a b': only letters, digits, '.', '_' and '-' are allowed",
        ),
        (
            ["topic", "create", "new", "--replication-factor", "3"],
            "mansio: replication factor 3 is larger than the number of brokers: 1",
        ),
        (["topic", "delete", "missing"], "mansio: there is no topic 'missing'"),
        (
            ["topic", "describe", "missing"],
            "mansio: topic missing: there is no such topic; create it or correct the name",
        ),
        (
            ["consume", "missing", "--exit-at-end"],
            "mansio: topic missing: there is no such topic; create it or correct the name",
        ),
        (
            ["topic", "alter", "orders", "--config", "retention=5"],
            "mansio: retention: no such topic setting; did you mean retention.ms?",
        ),
        (
            ["topic", "alter", "orders", "--partitions", "1"],
            "mansio: 1 partitions: the topic has 2; the number can only grow",
        ),
        (["group", "describe", "missing"], "mansio: there is no group missing"),
        (
            ["dlq", "peek", "orders"],
            "mansio: topic orders has no dead letters; `mansio dlq list` shows which do",
        ),
    ],
)
def test_request_that_the_broker_refuses(
    arguments: list[str], line: str, broker: mansio.Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert errors_of([*arguments, "--bootstrap-servers", broker.address], capsys) == (1, line)


def test_no_broker_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = errors_of(["topic", "list", "-b", "127.0.0.1:1"], capsys)
    assert code == 1
    assert line.startswith("mansio: cannot connect to 127.0.0.1:1: ")
    assert line.endswith(HINT)


@pytest.mark.parametrize(
    "arguments", [["-v", "topic", "list"], ["topic", "list", "-v"]], ids=["before", "after"]
)
def test_verbose_adds_the_traceback(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANSIO_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    with pytest.raises(SystemExit):
        main(arguments)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == f"mansio: cannot connect to 127.0.0.1:1: Connection refused; {HINT}"


def test_address_of_the_http_port(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        code, line = errors_of(["topic", "list", "-b", f"127.0.0.1:{port}"], capsys)
        thread.join()
    assert code == 1
    assert f"127.0.0.1:{port} violated the Kafka protocol: the peer uses HTTP: check address and port" in line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["topics", "list"], "no such command 'topics'. Did you mean 'topic'? (help: mansio -h)"),
        (
            ["serve", "--dta", "d"],
            "no such option: --dta (Possible options: --data, --dev, --set) (help: mansio serve -h)",
        ),
        (["serve", "--data"], "option '--data' requires an argument"),
        (["topic", "create"], "missing argument 'TOPIC' (help: mansio topic create -h)"),
        (
            ["topic", "list", "-b", "here:there"],
            "invalid value for '--bootstrap-servers' / '-b' (env var: 'MANSIO_BOOTSTRAP_SERVERS'): "
            "not an address: 'here:there' (host:port expected) (help: mansio topic list -h)",
        ),
        (
            ["serve", "--set", "num_partition=3"],
            "invalid value for --set: num_partition: no such setting; did you mean num_partitions? "
            "(help: mansio serve -h)",
        ),
        (
            ["serve", "--set", "num_partitions=many"],
            "invalid value for --set: num_partitions: input should be a valid integer, unable to parse string "
            "as an integer (help: mansio serve -h)",
        ),
    ],
)
def test_wrong_command_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert errors_of(arguments, capsys) == (2, f"mansio: {line}")


def test_command_that_needs_a_subcommand_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = errors_of(["topic"], capsys)
    assert code == 2
    assert shown.startswith("Usage: mansio topic ")
    assert "Create, list, describe, alter and delete topics" in shown


@pytest.mark.parametrize("flag", smoke_first("--kafka", "--http"))
def test_port_in_use_names_the_process(flag: str, tmp_path: Path) -> None:
    with used_port() as port:
        others = ["--http", ""] if flag == "--kafka" else ["--kafka", "127.0.0.1:0"]
        few = ["--set", "max_connections=16"]  # no warning, however low the hard limit of open files is
        code, line = serve(flag, f"127.0.0.1:{port}", *others, *few, directory=tmp_path)
    assert code == 1
    owner = f"pid {os.getpid()} (" if sys.platform == "linux" else "another process"
    assert line.startswith(f"mansio: 127.0.0.1:{port} is in use by {owner}")
    assert line.endswith(f": use {flag} for another port")


def test_data_directory_in_use(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path / "data", listeners="127.0.0.1:0"):
        found = serve("--data", "data", "--kafka", "127.0.0.1:0", "--http", "", directory=tmp_path)
    assert found == (1, "mansio: data directory data is in use by another broker: use --data")


def test_data_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    found = serve("--data", "data", "--kafka", "127.0.0.1:0", "--http", "", directory=tmp_path)
    assert found == (1, "mansio: cannot use data directory data: Not a directory; use --data")


@pytest.mark.full
def test_configuration_file_that_is_missing_or_has_an_unknown_setting(tmp_path: Path) -> None:
    assert serve("--config", "none.yaml", directory=tmp_path) == (
        1,
        "mansio: configuration file none.yaml: not found",
    )
    (tmp_path / "mansio.yaml").write_text("colour: red\n")
    assert serve("--config", "mansio.yaml", directory=tmp_path) == (
        1,
        "mansio: colour: no such setting (from the file mansio.yaml)",
    )
    (tmp_path / "mansio.yaml").write_text("kafkaa_listeners: 127.0.0.1:9092\n")
    assert serve("--config", "mansio.yaml", directory=tmp_path) == (
        1,
        "mansio: kafkaa_listeners: no such setting; did you mean listeners? (from the file mansio.yaml)",
    )


def test_spark_options_without_address_or_with_a_wrong_name() -> None:
    with pytest.raises(ConfigError, match=r"option kafka\.bootstrap\.servers is missing: give the address"):
        options.SourceOptions.parse({"subscribe": "orders"})
    with pytest.raises(ConfigError, match=r"no option 'broker': did you mean|no option 'broker': there are"):
        options.SourceOptions.parse({"broker": "127.0.0.1:9092", "subscribe": "orders"})


def test_client_without_arguments_uses_the_environment(
    broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANSIO_BOOTSTRAP_SERVERS", broker.address)
    with mansio.blocking.connect() as client:
        assert client.admin.list_topics() == ["orders"]
    monkeypatch.setenv("MANSIO_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    with pytest.raises(ConnectionLost) as refused, mansio.blocking.connect():
        pass
    assert str(refused.value) == f"cannot connect to 127.0.0.1:1: Connection refused; {HINT}"


@pytest.mark.parametrize("arguments", [{"dely": 3}, {"heders": []}])
def test_unknown_argument_of_publish_names_the_public_method(
    arguments: dict[str, object], broker: mansio.Broker
) -> None:
    with mansio.blocking.connect(broker.address) as client, client.producer() as producer:
        for each, name in ((client, "Client"), (producer, "Producer")):
            with pytest.raises(TypeError, match=rf"{name}\.publish\(\) got an unexpected keyword argument"):
                each.publish("orders", b"x", **arguments)  # type: ignore[arg-type]


def test_start_position_is_checked_when_the_consumer_is_created(broker: mansio.Broker) -> None:
    with mansio.blocking.connect(broker.address) as client:
        with pytest.raises(ValueError, match="'earliest', 'latest', an offset or a datetime, not 'begining'"):
            client.consume("orders", from_="begining")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="without time zone"):
            client.consume("orders", from_=datetime(2026, 1, 1))  # noqa: DTZ001
        with pytest.raises(InvalidRequest, match="offset -3 is negative"):
            client.consume("orders", from_=-3)


def test_redrive_of_a_topic_without_dead_letters_names_no_id(
    broker: mansio.Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert errors_of(["dlq", "redrive", "orders", "--all", "-b", broker.address], capsys) == (
        1,
        "mansio: topic orders has no dead letters; `mansio dlq list` shows which do",
    )


def test_embedded_broker_in_a_directory_in_use_raises_one_error_with_the_remedy(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path / "data"), pytest.raises(DataDirectoryLocked) as refused:
        mansio.Broker(tmp_path / "data").start()
    assert str(refused.value) == (
        f"data directory {tmp_path / 'data'} is in use by another broker: close it, or use another directory"
    )
    assert len(traceback.format_exception(refused.value, limit=0)) == 1


def test_doctor_reports_the_environment(broker: mansio.Broker, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main(["doctor", "--bootstrap-servers", broker.address])
    rows = capsys.readouterr().out.splitlines()
    checks = {
        name for row in rows for name in ("Python", "disk", "Kafka port", "Java", "broker") if name in row
    }
    assert checks == {"Python", "disk", "Kafka port", "Java", "broker"}
    assert any(row.startswith("ok") and f"{broker.address}: cluster " in row for row in rows)


def test_doctor_needs_no_extra(tmp_path: Path, broker: mansio.Broker) -> None:
    for name in ("grpc", "pyspark", "pyiceberg"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    done = subprocess.run(
        [sys.executable, "-m", "mansio.cli.main", "doctor", "--bootstrap-servers", broker.address],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(row.startswith("note") and "etcd" in row for row in done.stdout.splitlines()), done.stdout


def test_doctor_fails_when_the_given_broker_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--bootstrap-servers", "127.0.0.1:1"])
    assert end.value.code == 1
    assert "problem  broker" in capsys.readouterr().out


def disk_check(monkeypatch: pytest.MonkeyPatch, free_bytes: int, place: Path) -> tuple[str, str]:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: (10 << 30, 0, free_bytes))
    found = doctor.check_disk(str(place))
    return str(found.status), found.detail


def test_doctor_notices_a_disk_that_is_full_or_nearly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, detail = disk_check(monkeypatch, 3_000_000, tmp_path)
    assert status == "problem"
    assert "it is full, and a broker can store nothing" in detail
    status, detail = disk_check(monkeypatch, 200_000_000, tmp_path)
    assert status == "note"
    assert detail.endswith("0.2 of 10.7 GB free: less than 5%")
    assert "free" in disk_check(monkeypatch, 5 << 30, tmp_path)[1]


def test_doctor_notices_a_disk_on_which_it_cannot_write_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(doctor, "measure_flush_ms", fail)
    found = doctor.check_disk(str(tmp_path))
    assert (str(found.status), found.detail) == (
        "problem",
        f"{tmp_path}: the disk is full (No space left on device)",
    )
