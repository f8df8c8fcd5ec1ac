"""Operation in production: systemd service, log lines, installation files."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from mansio.cli.broker.service_manager import SystemdNotifier
from mansio.config.listeners import SecurityProtocol
from mansio.config.settings import SPECIFICATIONS
from mansio.config.sources import load_settings
from mansio.host.item_turns import Work
from mansio.state.quota import CONTROLLER_MUTATION_RATE
from support.documents import metrics_of_a_cluster
from support.machine import scaled
from support.paths import ROOT
from support.present import present
from support.process import ServedBroker, served
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

UNIT = ROOT / "deploy/systemd/mansio.service"
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) .+")


class Manager:
    """Stands for systemd: receives what a service sends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(0.05)
        self.received: list[str] = []

    def listen(self) -> list[str]:
        try:
            while True:
                self.received += self._socket.recv(4096).decode().split("\n")
        except TimeoutError:
            return self.received

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


@pytest.mark.row("A9")
def test_service_manager_hears_ready_alive_and_stopping_and_a_hung_loop_falls_silent(
    tmp_path: Path, manager: Manager
) -> None:
    environment = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "600000"}
    with served(tmp_path / "data", environment=environment) as broker:
        wait_until(lambda: "READY=1" in manager.listen(), 20)
        wait_until(lambda: manager.listen().count("WATCHDOG=1") >= 3, 20, "it feeds the watchdog")
        broker.signal(signal.SIGSTOP)
        manager.listen()
        silent = len(manager.received)
        for _ in range(12):  # three beats long
            manager.listen()
        broker_is_silent = len(manager.received) == silent
        broker.signal(signal.SIGCONT)
        assert broker_is_silent
        assert broker.stop() == 0
    manager.listen()
    assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in manager.received), "starting may take long"
    assert manager.received.index("READY=1") < manager.received.index("STOPPING=1")
    assert "WATCHDOG=1" not in manager.received[: manager.received.index("READY=1")]


def test_without_a_service_manager_nothing_is_reported_and_nothing_breaks(tmp_path: Path) -> None:
    notifier = SystemdNotifier({})
    notifier.heartbeat()
    notifier.ready("x")
    notifier.close()
    gone = SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "30000000"})
    gone.ready("x")
    gone.heartbeat()
    assert gone.heartbeat_interval_s <= scaled(10)
    gone.close()


def test_watchdog_of_another_process_is_not_fed(manager: Manager) -> None:
    environment = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}
    notifier = SystemdNotifier(environment)
    notifier.ready("x")
    notifier.heartbeat()
    notifier.close()
    assert manager.listen() == ["READY=1", "STATUS=x"]


# Log lines


def speak_nonsense(broker: ServedBroker, times: int) -> None:
    for _ in range(times):
        with socket.create_connection(("127.0.0.1", broker.kafka_port), timeout=scaled(10)) as peer:
            peer.sendall(b"GET / HTTP/1.1\r\n\r\nINFO forged\n")
            while peer.recv(1000):
                pass


@pytest.mark.row("T5")
def test_every_line_of_a_broker_is_an_event_and_hostile_peers_get_few_of_them(tmp_path: Path) -> None:
    with served(tmp_path / "data") as broker:
        begun = time.monotonic()
        speak_nonsense(broker, 200)
        took_s = time.monotonic() - begun
        assert broker.stop() == 0
        lines = broker.text().splitlines()
    (ready,) = [line for line in lines if line.startswith("mansio ")]
    assert " ready " in ready
    events = [line for line in lines if line != ready]
    assert all(LINE.fullmatch(line) for line in events), events
    assert any(" INFO broker_ready kafka=127.0.0.1:" in line for line in events)
    closed = [line for line in events if "connection_closed" in line]
    assert 1 <= len(closed) <= 15 + took_s
    counted = len(closed) + sum(int(count) for count in re.findall(r"held_back=(\d+)", "\n".join(closed)))
    assert counted == 200, "what was held back is counted"


def test_hostile_http_peers_get_few_lines_too(tmp_path: Path) -> None:
    with served(tmp_path / "data") as broker:
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", broker.http_port), timeout=scaled(10)) as peer:
                peer.sendall(b"\x00\x01nonsense\r\n\r\n")
                while peer.recv(1000):
                    pass
        assert broker.stop() == 0
        lines = [line for line in broker.text().splitlines() if not line.startswith("mansio ")]
    assert all(LINE.fullmatch(line) for line in lines), lines
    about_http = [line for line in lines if "uvicorn" in line]
    assert 1 <= len(about_http) <= 10


@pytest.mark.row("T5")
def test_json_lines_are_json_to_the_last(tmp_path: Path) -> None:
    with served(tmp_path / "data", arguments=["--set", "log_format=json"]) as broker:
        speak_nonsense(broker, 3)
        text = httpx.get(f"{broker.http_url}/metrics", timeout=scaled(10)).text
        assert broker.stop() == 0
        lines = [line for line in broker.text().splitlines() if not line.startswith("mansio ")]
    events = [json.loads(line) for line in lines]
    assert {"broker_ready", "connection_closed"} <= {event["event"] for event in events}
    assert all({"time", "level", "event", "logger"} <= set(event) for event in events)
    assert re.search(r'^mansio_log_lines_total\{level="warning"\} [1-9]', text, re.MULTILINE)
    assert re.search(r'^mansio_connections_closed_total\{reason="[A-Za-z]+"\} 3\.0', text, re.MULTILINE)


def test_no_record_and_no_secret_is_in_the_log_at_any_level(tmp_path: Path) -> None:
    import mansio

    with served(tmp_path / "data", arguments=["--set", "log_level=debug"]) as broker:
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.create_topic("t")
            client.publish("t", b"my-secret-value", key=b"my-secret-key")
            with pytest.raises(mansio.MansioError):
                client.publish("missing\ntopic", b"my-secret-value")
        assert broker.stop() == 0
        assert "my-secret" not in broker.text()


# The document

DOCUMENT = (ROOT / "docs/how-to/operations.md").read_text()
METRICS_WITH_TLS = {"mansio_tls_certificate_expiry_seconds"}
EXAMPLES = dict(
    re.findall(r"^<!-- example: (\S+) -->\n```sh\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
)


def run_example(name: str, broker: ServedBroker, directory: Path) -> subprocess.CompletedProcess[str]:
    """A command of the document as it stands, but for the paths and the port."""
    code = EXAMPLES[name].replace("/var/lib/mansio-restored", str(directory / "restored"))
    code = code.replace("/var/lib/mansio", str(broker.data)).replace("http://127.0.0.1:9080", broker.http_url)
    commands = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return subprocess.run(
        ["sh", "-euc", code],
        cwd=directory,
        env={**os.environ, "PATH": commands, "MANSIO_BOOTSTRAP_SERVERS": broker.bootstrap_servers},
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )


@pytest.mark.full
@pytest.mark.row("O2")
def test_backup_restore_and_data_check_work_as_documented(tmp_path: Path) -> None:
    import mansio

    with served(tmp_path / "data") as broker:
        if shutil.which("curl"):
            assert {"ready", "reasons", "disk"} <= set(
                json.loads(run_example("health", broker, tmp_path).stdout)
            )
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.create_topic("t")
            client.publish("t", b"kept")
        quotas = run_example("quotas", broker, tmp_path)
        if (
            quotas.returncode
        ):  # a command waits 5 s for its broker; a busy machine may need them to start the command
            quotas = run_example("quotas", broker, tmp_path)
        assert quotas.returncode == 0, quotas.stderr
        assert "reports" in quotas.stdout
        assert "5000000" in quotas.stdout
        rates = run_example("connection-rates", broker, tmp_path)
        assert rates.returncode == 0, rates.stderr
        refused = run_example("data-check", broker, tmp_path)
        assert refused.returncode == 2
        assert "a broker runs on" in refused.stderr
        assert broker.stop() == 0
        for name in ("data-check", "repair", "backup", "restore"):
            done = run_example(name, broker, tmp_path)
            assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        assert "No damage found." in done.stdout
    with served(tmp_path / "restored") as again, mansio.blocking.connect(again.bootstrap_servers) as client:
        client.publish("t", b"and more")
        assert f'topic="t"}} {2.0}' in httpx.get(f"{again.http_url}/metrics", timeout=scaled(10)).text


def test_document_speaks_only_of_metrics_and_settings_that_exist(served_broker: ServedBroker) -> None:
    import mansio

    with (
        mansio.blocking.connect(served_broker.bootstrap_servers) as client,
        pytest.raises(mansio.MansioError),
    ):
        client.admin.delete_topic("missing")  # some error, so that errors are shown

    def scraped() -> str:
        text = httpx.get(f"{served_broker.http_url}/metrics", timeout=scaled(10)).text
        return text if "mansio_disk_free_bytes" in text else ""

    text = wait_until(scraped, 10, "the disk has been looked at")
    exported = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)) | set(
        re.findall(r"^(\w+)", text, re.MULTILINE)
    )
    named = set(re.findall(r"\bmansio_[a-z_]+|\bprocess_[a-z_]+", DOCUMENT))
    assert len(named) > 20
    assert named >= METRICS_WITH_TLS, "tests/component/test_protected_start.py looks at those"
    assert named - exported - METRICS_WITH_TLS == metrics_of_a_cluster(DOCUMENT), (
        "tests/system/cluster looks at those"
    )
    settings = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", DOCUMENT)) - named
    reasons = {work.value for work in Work} | {
        "log_failed",
        "log_corrupt",
        "partition_not_open",
        "metadata_failed",
        "connection_creation_rate",  # a quota
        "event_loop_stalled",
        "disk_low",
        "disk_full",
        "certificate_expires_soon",
        "secrets_key_missing",
        "no_administrator",
        "no_keys",  # a reason of failed log-ins
        "confirmed_by",  # a field of session_ended_early
        "corrupt_batch",
        "unreadable_batch",
        "queue_full",
        "too_many_wrong",
        "log_truncated",
        "hold_released",
        "holds_not_loaded",
        "dead_letters_pending",
        "delayed_records_near_limit",
        "deduplication_ids_near_limit",
        "schedule_cannot_fire",
        "transaction_open",
        "transaction_may_hang",
        "share_records_near_retention",
        "holds_near_release",
        "holds_not_enforced",
        "timed_out",
    }
    modules = [ROOT / "src" / "mansio" / "api" / "http" / "metrics_cluster.py"]
    modules += (ROOT / "src" / "mansio" / "metadata").rglob("*.py")
    of_a_cluster = {
        word.lower()
        for one in modules
        for found in re.findall(r'"([a-z_]+)"|\bCallOutcome\.([A-Z_]+)', one.read_text())
        for word in found
    }
    sources = [path.read_text() for path in (ROOT / "src" / "mansio").rglob("*.py")]
    log_events = {name for text in sources for name in re.findall(r'logger\.[a-z]+\(\s*"([a-z_]+)"', text)}
    others = {"disk_unresponsive", "held_back", "hold_ms", "log_waits_for_descriptors"}
    others |= {CONTROLLER_MUTATION_RATE}
    words = settings - set(SPECIFICATIONS) - reasons - log_events - others
    assert sorted(words - of_a_cluster) == []


# The files


def unit_file() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment]  # systemd's names have capitals
    parser.read_string(UNIT.read_text())
    return parser


def test_systemd_takes_the_unit_without_a_word(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is missing; the next test reads the unit without it")
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(), flags=re.MULTILINE)
    (tmp_path / "mansio.service").write_text(text)
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(tmp_path / "mansio.service")],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if "mansio.service" in line]
    assert (done.returncode, complaints) == (0, []), done.stderr


def test_unit_is_confined_and_runs_a_command_that_exists() -> None:
    service = unit_file()["Service"]
    for name, value in {
        "Type": "notify",
        "DynamicUser": "yes",
        "StateDirectory": "mansio",
        "ProtectSystem": "strict",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "",
    }.items():
        assert service[name] == value, name
    assert int(service["LimitNOFILE"]) >= 4096 * 2 + present(SPECIFICATIONS["open_files_max"].minimum)
    command = service["ExecStart"].split()
    assert command[1] == "serve"
    help_text = subprocess.run(
        [*_mansio(), "serve", "--help"], capture_output=True, text=True, timeout=scaled(60), check=True
    ).stdout
    assert all(flag in help_text for flag in command if flag.startswith("--"))


def test_compose_file_is_sound_and_names_settings_that_exist() -> None:
    import yaml

    services = yaml.safe_load((ROOT / "deploy/container/compose.yaml").read_text())["services"]
    mansio = services["mansio"]
    given = {name.removeprefix("MANSIO_").lower(): value for name, value in mansio["environment"].items()}
    assert set(given) <= set(SPECIFICATIONS)
    assert mansio["command"] == ["serve", "--secure"]
    settings = load_settings(None, {"data_dir": "/data", **given}, environment=False, is_protected=True)
    assert not settings.unprotected_listeners
    assert {one.security_protocol for one in settings.kafka_listeners.all} == {SecurityProtocol.SASL_SSL}
    advertised = {one.name: one.advertised for one in settings.kafka_listeners.all}
    assert advertised == {"CONTAINERS": ("mansio", 29092), "HOST": ("127.0.0.1", 9092)}
    assert all(port.startswith("127.0.0.1:") for port in mansio["ports"]), "nothing listens beyond loopback"
    assert mansio["image"] == "mansio:${MANSIO_VERSION}"


def _mansio() -> list[str]:
    from support.paths import mansio_command

    return mansio_command()
