"""`mansio dev-cluster`: the processes it starts, what it reports of them, and that none is left.

Brokers are played by a program that takes a broker's arguments and prints a broker's ready line; etcd is real.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.cli.broker.dev_cluster import _remove_unless_in_use, processes
from mansio.cli.broker.dev_cluster.plan import (
    BrokerPlan,
    ClusterPlan,
    check_settings,
    data_directories_in_use,
    plan_cluster,
)
from mansio.cli.main import main
from mansio.config.sources import load_settings
from mansio.errors import ConfigError, Unavailable
from mansio.host.disk import HostDisk
from support.machine import scaled
from support.paths import ROOT, required_tool
from support.present import present
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

READY_S = 60.0

BROKER = """\
import os, signal, sys, time
import fcntl
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
os.makedirs(given["--data"], exist_ok=True)
lock = open(given["--data"] + "/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
if os.path.exists(f"fails-{given['--node-id']}"):
    sys.exit("mansio: the disk of this broker is on fire")
def stop(number, frame):
    print("stopped by", signal.Signals(number).name, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("a line before", flush=True)
if os.path.exists(f"log-fails-{given['--node-id']}"):
    print("2026-01-01T00:00:00.000Z ERROR log_failed topic=flights partition=0 reason=EIO", flush=True)
print(f"mansio 0 ready kafka={given['--kafka']} http={given['--http']} data=x pid={os.getpid()}", flush=True)
while True: time.sleep(1)
"""

DRIVER = """\
import asyncio, os, sys
from mansio.cli.broker.dev_cluster.plan import plan_cluster
from mansio.cli.broker.dev_cluster.processes import run_until_stopped
from mansio.cli.support.common import print_error
from mansio.errors import MansioError
async def formed(plan, files): ...
try:
    members, restart = int(sys.argv[1]), sys.argv[2] == "restart"
    plan = plan_cluster(os.path.abspath("cluster"), brokers=3, members=members, first_port=None, settings={})
    command = [sys.executable, "-S", "broker.py"]
    sys.exit(asyncio.run(run_until_stopped(plan, command=command, formed=formed, restart=restart)))
except MansioError as error:
    sys.exit(print_error(error.message))
"""


class Started:
    """A dev-cluster in a process group of its own, as a terminal would have it."""

    def __init__(self, directory: Path, members: int, *, restart: bool) -> None:
        required_tool("etcd")
        (directory / "broker.py").write_text(BROKER)
        (directory / "driver.py").write_text(DRIVER)
        (directory / "cluster").mkdir(exist_ok=True)
        self.directory = directory
        self.out = directory / "out"
        self.errors = directory / "errors"
        with self.out.open("wb") as out, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "driver.py", str(members), "restart" if restart else "no-restart"],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            )

    def ready(self) -> dict[str, str]:
        """The fields of its ready line."""
        wait_until(lambda: "ready" in self.out.read_text() or self.ended(), READY_S, "the ready line")
        assert not self.ended(), self.output()
        return dict(word.split("=", 1) for word in self.out.read_text().split() if "=" in word)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def output(self) -> str:
        return self.errors.read_text()

    def left(self) -> list[str]:
        """Processes that were started for this cluster and are still there."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    line = file.read().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.directory / "cluster") in line:
                found.append(line)
        return found


@contextmanager
def dev_cluster(directory: Path, members: int = 1, *, restart: bool = True) -> Iterator[Started]:
    started = Started(directory, members, restart=restart)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()
        wait_until(lambda: not started.left(), 15, "nothing is left")


def test_broker_that_is_killed_is_restarted_and_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    with dev_cluster(tmp_path) as cluster:
        ready = cluster.ready()
        assert len(ready["kafka"].split(",")) == 3
        pids = [int(pid) for pid in ready["pids"].split(",")]
        assert len(cluster.left()) == 4  # three brokers and etcd
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: cluster.output().count("broker 2 ready after") == 2, 30)
        output = cluster.output()
        assert f"broker 2 (pid {pids[1]}) has ended: killed by SIGKILL" in output
        assert "    a line before" in output
        wait_until(lambda: len(cluster.left()) == 4, 30, "three brokers and etcd run")

        os.killpg(cluster.process.pid, signal.SIGINT)  # what a terminal does
        assert cluster.process.wait(scaled(20)) == 0, cluster.output()
        assert cluster.left() == []
        wait_until(lambda: "stopped by SIGTERM" in (tmp_path / "cluster/broker-1.log").read_text(), 10)
        assert "did not stop cleanly" not in cluster.output()


@pytest.mark.parametrize(
    ("number", "log_fails", "restart", "reason"),
    [
        (signal.SIGTERM, False, True, "it was stopped"),
        (signal.SIGKILL, True, True, "a write or flush of a log failed"),
        (signal.SIGKILL, False, False, "--no-restart"),
    ],
)
def test_broker_that_was_stopped_or_lost_its_disk_stays_down(
    tmp_path: Path, number: signal.Signals, log_fails: bool, restart: bool, reason: str
) -> None:
    if log_fails:
        (tmp_path / "log-fails-2").touch()
    with dev_cluster(tmp_path, restart=restart) as cluster:
        pid = int(cluster.ready()["pids"].split(",")[1])
        os.kill(pid, number)
        wait_until(lambda: "start it again with" in cluster.output(), 30)
        assert f"broker 2 is not restarted ({reason}" in cluster.output()
        assert "mansio serve --node-id 2" in cluster.output()
        assert len(cluster.left()) == 3
        assert not cluster.ended()


def test_etcd_runs_as_long_as_a_broker_that_the_user_started(tmp_path: Path) -> None:
    with dev_cluster(tmp_path, restart=False) as cluster:
        pids = [int(pid) for pid in cluster.ready()["pids"].split(",")]
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: "broker 1 is not restarted" in cluster.output(), 30)
        words = cluster.output().partition("start it again with: mansio ")[2].splitlines()[0].split()
        own = subprocess.Popen(
            [sys.executable, "-S", "broker.py", *words], cwd=tmp_path, stdout=subprocess.PIPE
        )
        try:
            stdout = present(own.stdout)
            wait_until(lambda: b"ready" in stdout.readline(), 30)
            for pid in pids[1:]:
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: cluster.output().count("is not restarted") == 3, 30)
            assert data_directories_in_use(str(tmp_path / "cluster")) == [str(tmp_path / "cluster/broker-1")]
            assert not cluster.ended()
            assert len(cluster.left()) == 2  # the user's broker and etcd
        finally:
            own.kill()
            own.communicate()
        assert cluster.process.wait(scaled(20)) == 1
        assert "no broker is left" in cluster.output()


def test_temporary_directory_is_kept_while_a_broker_uses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broker-2").mkdir()
    lock = HostDisk().lock(str(tmp_path / "broker-2/lock"))
    _remove_unless_in_use(str(tmp_path))
    assert (tmp_path / "broker-2/lock").exists()
    assert f"{tmp_path} is kept" in capsys.readouterr().err
    lock.release()
    _remove_unless_in_use(str(tmp_path))
    assert not tmp_path.exists()


def test_a_broker_that_does_not_start_ends_everything_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "fails-3").touch()
    with dev_cluster(tmp_path) as cluster:
        assert cluster.process.wait(scaled(READY_S)) == 1
        assert "    mansio: the disk of this broker is on fire" in cluster.output()
        assert "mansio: broker 3 did not start: exit code 1" in cluster.output()
        assert cluster.left() == []
        assert cluster.out.read_text() == ""


def test_when_no_broker_is_left_it_ends_and_reports_it(tmp_path: Path) -> None:
    with dev_cluster(tmp_path) as cluster:
        for pid in cluster.ready()["pids"].split(","):
            os.kill(int(pid), signal.SIGTERM)
        assert cluster.process.wait(scaled(20)) == 1
        assert "no broker is left" in cluster.output()
        assert cluster.left() == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can tie a process to its parent")
def test_nothing_outlives_a_sigkill_of_dev_cluster(tmp_path: Path) -> None:
    with dev_cluster(tmp_path) as cluster:
        cluster.ready()
        assert len(cluster.left()) == 4
        cluster.process.kill()
        wait_until(lambda: not cluster.left(), 15, "nothing is left")


def test_three_members_of_etcd_start_and_stop_together(tmp_path: Path) -> None:
    with dev_cluster(tmp_path, members=3) as cluster:
        assert len(cluster.ready()["etcd"].split(",")) == 3
        assert len(cluster.left()) == 6
        cluster.process.terminate()
        assert cluster.process.wait(scaled(20)) == 0, cluster.output()
        assert cluster.left() == []


def test_a_terminal_that_is_closed_stops_it_like_ctrl_c(tmp_path: Path) -> None:
    with dev_cluster(tmp_path) as cluster:
        wait_until(lambda: "starting" in cluster.output() or cluster.ended(), READY_S)
        cluster.process.send_signal(signal.SIGHUP)
        assert cluster.process.wait(scaled(20)) == 0, cluster.output()
        assert cluster.left() == []


def test_it_is_ready_when_a_client_sees_every_broker_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a real broker, which is a whole cluster of one and not one of two."""
    with mansio.Broker(tmp_path / "data", listeners="127.0.0.1:0") as broker:
        port = int(broker.address.rpartition(":")[2])
        one = BrokerPlan(1, port, 0, "")
        asyncio.run(processes._wait_until_formed(ClusterPlan("", (), (one,), {}), None))
        monkeypatch.setattr(processes, "FORMED_S_MAX", 2.0)
        with pytest.raises(Unavailable, match="after 2 s 1 of 2 brokers have registered"):
            asyncio.run(processes._wait_until_formed(ClusterPlan("", (), (one, one), {}), None))


# -- the plan --------


def plan(directory: Path, **given: object) -> ClusterPlan:
    wanted: dict[str, object] = {"brokers": 3, "members": 1, "first_port": None, "settings": {}, **given}
    return plan_cluster(str(directory), **wanted)  # type: ignore[arg-type]  # as given


def test_a_directory_keeps_its_ports_and_every_port_is_used_once(tmp_path: Path) -> None:
    first = plan(tmp_path, brokers=5, members=3)
    ports = [port for broker in first.brokers for port in (broker.kafka_port, broker.http_port)]
    ports += [
        port for one in first.members for port in (one.own_address.peer_port, one.own_address.client_port)
    ]
    assert len(set(ports)) == len(ports) == 16
    assert plan(tmp_path, brokers=2, members=3).brokers == first.brokers[:2]
    assert plan(tmp_path, brokers=5, members=3) == first
    with pytest.raises(ConfigError, match="has 3 members; their number cannot be changed"):
        plan(tmp_path, members=1)


def test_a_broker_gets_another_port_when_its_own_is_taken_a_member_of_etcd_cannot(tmp_path: Path) -> None:
    import socket

    first = plan(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first.brokers[0].kafka_port))
        taken.listen()
        second = plan(tmp_path)
        assert second.brokers[0].kafka_port != first.brokers[0].kafka_port
        assert second.brokers[1:] == first.brokers[1:]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first.members[0].own_address.peer_port))
        taken.listen()
        with pytest.raises(ConfigError, match="is in use by pid"):
            plan(tmp_path)


def test_a_directory_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        plan(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize(
    "settings", [{"num_partitions": "many"}, {"numpartitions": "3"}, {"listeners": "127.0.0.1:9092"}]
)
def test_settings_that_no_broker_takes_are_refused_before_anything_starts(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        check_settings(settings)


def test_what_a_broker_is_given_makes_the_settings_it_should(tmp_path: Path) -> None:
    made = plan(tmp_path, first_port=None, settings={"num_partitions": "4"})
    arguments = made.arguments(made.brokers[2])
    assert arguments[0] == "serve"
    arguments.remove("--dev")
    given = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert (given["--node-id"], given["--etcd"]) == ("3", made.members[0].client_url)
    assert "default_replication_factor=3" in arguments
    assert "num_partitions=4" in arguments
    assert "default_replication_factor=2" in plan(tmp_path, brokers=2).arguments(made.brokers[0])


@pytest.mark.parametrize("is_protected", [False, True])
def test_a_directory_stays_protected_or_open_as_it_was_made(tmp_path: Path, is_protected: bool) -> None:
    first = plan(tmp_path, is_protected=is_protected)
    assert plan(tmp_path, is_protected=is_protected) == first
    with pytest.raises(
        ConfigError, match=f"--secure: .* was made {'with' if is_protected else 'without'} it"
    ):
        plan(tmp_path, is_protected=not is_protected)


def test_brokers_and_members_of_a_protected_plan_have_tls_everywhere(tmp_path: Path) -> None:
    made = plan(tmp_path, members=3, is_protected=True)
    files = set()
    for broker in made.brokers:
        settings = load_settings(None, made.values(broker), environment=False)
        assert {str(each.security_protocol) for each in settings.kafka_listeners.all} == {"SASL_SSL"}
        assert not [url for url in settings.etcd_urls if not url.startswith("https:")]
        assert settings.etcd_cert_file == settings.ssl_certificate_location
        assert settings.etcd_ca_file == settings.ssl_ca_location == f"{tmp_path}/security/ca.pem"
        assert settings.open_listeners == "http"
        files.add(settings.ssl_certificate_location)
    for member in made.members:
        tls = present(member.tls)
        assert tls.ca_file == f"{tmp_path}/security/ca.pem"
        files.add(tls.cert_file)
    assert len(files) == 6


@pytest.mark.parametrize(
    "settings",
    [
        {"ssl_ca_location": "ca.pem"},
        {"etcd_cert_file": "mine.pem"},
        {"listener_security_protocol_map": "SASL_SSL:PLAINTEXT"},
        {"sasl_enabled_mechanisms": "NONE"},
    ],
)
def test_settings_that_contradict_protection_are_refused_before_anything_starts(
    settings: dict[str, str],
) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        check_settings(settings, is_protected=True)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ["--secure", "--set", "ssl_key_location=k"],
            "ssl_key_location: --secure makes a certificate of its",
        ),
        (["--etcd-members", "2"], "2 tolerate no more failures than 1"),
        (["--set", "node_id=3"], "node_id: set by dev-cluster"),
        (["--set", "num_partitions=0"], "num_partitions: 0 is below the minimum"),
    ],
)
def test_an_invalid_command_line_is_refused_before_anything_is_created(
    tmp_path: Path, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["dev-cluster", "--data", str(tmp_path / "data"), *flags])
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
