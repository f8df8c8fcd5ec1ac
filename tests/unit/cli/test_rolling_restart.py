"""Rolling restarts: order of the brokers, what must be true before and after each restart, failures, the command."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mansio.cli.admin import cluster as commands
from mansio.cli.admin import rolling_restart
from mansio.cli.admin.rolling_restart import RestartCommand, RestartFailed, RollingRestart, obstacle
from mansio.cli.main import main
from mansio.client.admin.cluster import (
    BrokerHealth,
    BrokerStatus,
    ClusterStatus,
    ElectionResult,
    PartitionStatus,
)
from mansio.errors import RequestTimedOut, UnsupportedVersion
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from pathlib import Path

    from mansio.client.admin.cluster import ClusterAdmin


def partition(index: int, replicas: Sequence[int], **more: Any) -> PartitionStatus:
    fields = {"leader": replicas[0], "in_sync": tuple(replicas), "least": 2, **more}
    return PartitionStatus(
        "t",
        index,
        fields["leader"],
        1,
        tuple(replicas),
        tuple(fields["in_sync"]),
        (),
        fields["least"],
        is_internal=False,
    )


class FakeBrokers:
    """Three brokers with a partition that each of them leads. A restart takes some looks: the broker is away, then back
    with another epoch, then in sync, and does not lead."""

    def __init__(self, *, controller: int = 1, looks: int = 2, has_epochs: bool = True) -> None:
        self.controller = controller
        self.looks = looks
        self.epochs: dict[int, int | None] = {one: 100 + one if has_epochs else None for one in (1, 2, 3)}
        self.has_epochs = has_epochs
        self.away: dict[int, int] = {}
        self.lagging: dict[int, int] = {}
        self.led_by_others: set[int] = set()
        self.restarted: list[int] = []
        self.events: list[tuple[str, int]] = []
        self.asked: list[int | None] = []
        self.health_errors: dict[int, Any] = {}

    async def restart(self, node_id: int, host: str) -> None:
        assert host == f"host-{node_id}"
        assert not self.away
        assert not self.lagging, "another broker is not in sync"
        assert not self.led_by_others
        self.restarted.append(node_id)
        self.away[node_id] = self.looks
        self.led_by_others.add(node_id)

    async def status(self) -> ClusterStatus:
        brokers = [
            BrokerStatus(one, f"host-{one}", 9092, None, one == self.controller, one in self.away)
            for one in (1, 2, 3)
        ]
        return ClusterStatus("id", self.controller, tuple(brokers))

    async def health(self, brokers: Iterable[int]) -> list[BrokerHealth]:
        (node_id,) = brokers
        if node_id in self.away:
            self.away[node_id] -= 1
            if self.away[node_id] <= 0:
                del self.away[node_id]
                self.lagging[node_id] = self.looks
                if self.has_epochs:
                    self.epochs[node_id] = (self.epochs[node_id] or 0) + 100
            return []
        return [
            BrokerHealth(
                node_id, broker_epoch=self.epochs[node_id], error=self.health_errors.pop(node_id, None)
            )
        ]

    async def partitions(self, *, broker: int | None) -> list[PartitionStatus]:
        self.asked.append(broker)
        found = []
        for node_id in (1, 2, 3):
            replicas = (node_id, node_id % 3 + 1, (node_id + 1) % 3 + 1)
            in_sync = [one for one in replicas if one not in self.lagging and one not in self.away]
            leader = replicas[1] if node_id in self.led_by_others else node_id
            found.append(partition(node_id, replicas, leader=leader, in_sync=in_sync))
        for node_id in tuple(self.lagging):
            self.lagging[node_id] -= 1
            if self.lagging[node_id] <= 0:
                del self.lagging[node_id]
        return found

    async def elect_leaders(self, kind: str, partitions: Sequence[Any]) -> list[ElectionResult]:
        assert kind == "preferred"
        for _, index in partitions:
            self.led_by_others.discard(index)
            self.events.append(("elected", index))
        return [ElectionResult(topic, index, "elected") for topic, index in partitions]


class Run:
    """A rolling restart of fake brokers, with its lines."""

    def __init__(
        self,
        brokers: FakeBrokers,
        node_ids: Sequence[int] = (1, 2, 3),
        *,
        restart: Any = None,
        timeout_s: float = 60,
    ) -> None:
        self.lines: list[str] = []
        status = asyncio.run(brokers.status())
        chosen = [one for one in status.brokers if one.node_id in node_ids]
        chosen.sort(key=lambda one: node_ids.index(one.node_id))
        self.work = RollingRestart(
            cast("ClusterAdmin", brokers),
            chosen,
            restart=restart or brokers.restart,
            report=self.lines.append,
            timeout_s=timeout_s,
            poll_s=0,
        )

    def __call__(self) -> list[int]:
        asyncio.run(self.work.run())
        return self.work.done


@pytest.mark.parametrize("has_epochs", [True, False])
def test_brokers_restart_one_at_a_time_and_the_controller_last(has_epochs: bool) -> None:
    brokers = FakeBrokers(controller=1, has_epochs=has_epochs)
    run = Run(brokers)
    assert run() == brokers.restarted == [2, 3, 1]
    assert [node_id for _, node_id in brokers.events] == [2, 3, 1], (
        "each leads again before the next one stops"
    )
    assert run.work.left == []
    assert [line.split(" after ")[0] for line in run.lines] == [
        f"broker {node_id}: restarted and in sync" for node_id in (2, 3, 1)
    ]


def test_only_the_chosen_brokers_restart_in_the_order_given() -> None:
    assert Run(FakeBrokers(controller=2), (3, 1))() == [3, 1]


def test_what_is_in_sync_is_asked_of_the_broker_that_was_restarted() -> None:
    """Any other broker may still have the metadata from before the restart."""
    brokers = FakeBrokers(looks=1)
    Run(brokers, (2, 3))()
    assert brokers.asked[0] is None
    assert set(brokers.asked[1:]) == {2, 3}
    assert brokers.asked.index(3) > brokers.asked.index(2)


def test_a_broker_that_does_not_come_back_ends_the_restart() -> None:
    brokers = FakeBrokers(looks=10**9)
    run = Run(brokers, timeout_s=0.01)
    with pytest.raises(RestartFailed, match="broker 2: it is not back after 0 s: it has no session"):
        run()
    assert (run.work.done, run.work.left) == ([], [1, 2, 3])
    assert brokers.restarted == [2]


def test_a_command_that_restarts_nothing_is_noticed() -> None:
    async def restart(_node_id: int, _host: str) -> None: ...

    run = Run(FakeBrokers(), restart=restart, timeout_s=0.01)
    with pytest.raises(RestartFailed, match="it was not stopped yet"):
        run()


def test_a_command_that_fails_ends_the_restart_at_once() -> None:
    async def restart(_node_id: int, _host: str) -> None:
        raise RestartFailed("the command ended with exit code 3")

    with pytest.raises(RestartFailed, match="broker 2: the command ended with exit code 3"):
        Run(FakeBrokers(), restart=restart)()


def test_a_command_that_waits_for_the_broker_does_not_block_the_look_at_it() -> None:
    brokers = FakeBrokers(has_epochs=False)

    async def restart(node_id: int, host: str) -> None:
        await brokers.restart(node_id, host)
        for _ in range(20):  # longer than the broker is away
            await asyncio.sleep(0)

    assert Run(brokers, restart=restart)() == [2, 3, 1]


def test_nothing_restarts_while_a_replica_is_not_in_sync_and_failed_requests_are_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rolling_restart, "PROGRESS_S", 0.0)
    brokers = FakeBrokers()
    brokers.lagging = {3: 3}
    brokers.health_errors = {2: RequestTimedOut("slow")}
    run = Run(brokers, (2,))
    assert run() == [2]
    assert "broker 2: waits: 3 partitions with replicas that are not in sync, the first is t-1" in run.lines
    assert "broker 2: waits: it does not answer" in run.lines


def test_a_broker_of_an_older_version_restarts_into_a_newer_one() -> None:
    brokers = FakeBrokers()
    brokers.epochs = dict.fromkeys((1, 2, 3))
    brokers.health_errors = {2: UnsupportedVersion("no such API")}
    assert Run(brokers, (2,))() == [2]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([partition(0, (1, 2, 3))], ""),
        ([partition(0, (1, 2, 3), leader=2, in_sync=(2, 3))], ""),  # it is down itself
        ([partition(0, (2,)), partition(1, (2,), leader=-1)], ""),
        (
            [partition(0, (1, 2, 3), in_sync=(1, 2))],
            "1 partition with replicas that are not in sync, the first is t-0",
        ),
        (
            [partition(0, (1, 2)), partition(7, (1, 3), leader=-1)],
            "1 partition without a leader, the first is t-7",
        ),
    ],
)
def test_what_keeps_a_broker_from_being_stopped(found: Sequence[PartitionStatus], text: str) -> None:
    assert obstacle(found, node_id=1 if len(found[0].replicas) > 1 else 2) == text


# -- the command of the operator --------


def test_placeholders_are_whole_words_of_the_command_whatever_they_contain() -> None:
    command = RestartCommand.parse("ssh -p 22 'root@{host}' \"systemctl restart mansio@{broker}\"")
    assert command.arguments_for(2, "fe80::1") == (
        ["ssh", "-p", "22", "root@fe80::1", "systemctl restart mansio@2"]
    )
    for host in ("-oProxyCommand=x", "a b", "a;b", "$(x)", "", "{broker}"):
        with pytest.raises(RestartFailed, match=r"the command needs \{host\}"):
            command.arguments_for(2, host)
    assert RestartCommand.parse("restart {broker}").arguments_for(3, "") == ["restart", "3"]


@pytest.mark.parametrize("text", ["", "ssh {hots}", "ssh {host.__class__}", "ssh {}", "ssh 'x"])
def test_a_command_that_is_wrong_is_refused_before_anything_is_done(text: str) -> None:
    with pytest.raises(ValueError, match=r"empty|placeholder|quotation"):
        RestartCommand.parse(text)


def test_a_command_runs_without_a_shell_and_its_exit_code_counts(tmp_path: Path) -> None:
    (file,) = (tmp_path / "2;touch x",)
    run: Callable[[RestartCommand], None] = lambda command: asyncio.run(command.run(2, "h"))  # noqa: E731
    run(RestartCommand(("touch", str(file))))
    assert file.exists()
    with pytest.raises(RestartFailed, match="exit code 3: sh -c 'exit 3'"):
        run(RestartCommand.parse("sh -c 'exit 3'"))
    with pytest.raises(
        RestartFailed, match=r"no-such-program cannot be run: (No such file|Permission denied)"
    ):
        run(RestartCommand.parse("no-such-program {broker}"))


def test_an_interrupted_command_is_ended(tmp_path: Path) -> None:
    started = tmp_path / "started"

    async def interrupt() -> None:
        command = RestartCommand(
            ("sh", "-c", f"echo $$ > {started}.new; mv {started}.new {started}; exec sleep 600")
        )
        running = asyncio.create_task(command.run(1, "h"))
        await asyncio.to_thread(wait_until, started.exists, 30, "the command runs")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(interrupt())
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


class Shown(FakeBrokers):
    """Fake brokers for the command, which reads partitions of any broker."""

    async def partitions(self, *, broker: int | None = None) -> list[PartitionStatus]:
        return [*await super().partitions(broker=broker), partition(9, (2,), least=1)]

    async def health(self, brokers: Iterable[int]) -> list[BrokerHealth]:
        return await super().health(brokers)


def shell(
    brokers: Shown, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    @asynccontextmanager
    async def connect(_bootstrap_servers: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(admin=SimpleNamespace(cluster=brokers))

    monkeypatch.setattr(commands, "connect", connect)
    monkeypatch.setattr(rolling_restart, "POLL_S", 0.0)
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "rolling-restart", *arguments])
    output, errors = capsys.readouterr()
    return cast("int", ended.value.code), output, errors


def test_the_command_shows_the_order_and_what_is_not_writable_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = shell(Shown(controller=1), monkeypatch, capsys, "--dry-run")
    assert code == 0
    assert [line.split() for line in output.splitlines()[1:]] == [
        ["2", "host-2", "no", "2", "4", "1"],
        ["3", "host-3", "no", "1", "3", "0"],
        ["1", "host-1", "yes", "1", "3", "0"],
    ]
    code, _, errors = shell(Shown(), monkeypatch, capsys)
    assert code == 2
    assert "restart 3 brokers, one at a time; acks=all is rejected for 1 partition meanwhile" in errors
    for arguments, text in (
        (("--brokers", "2,7"), "there is no broker 7"),
        (("--brokers", "2,2"), "no list of different node ids"),
        (("--timeout", "soon"), "not a duration"),
        (("--command", "x {y}"), "no placeholder {y}"),
    ):
        code, _, errors = shell(Shown(), monkeypatch, capsys, *arguments)
        assert code
        assert text in errors


def test_after_a_failure_the_command_names_the_brokers_that_are_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = shell(
        Shown(), monkeypatch, capsys, "--yes", "--brokers", "3,2", "--command", "false {broker}"
    )
    assert code == 1
    assert "mansio: broker 3: the command ended with exit code 1: false 3\n" in errors
    assert "restarted brokers: none; to continue, run the command again with --brokers 3,2" in errors
