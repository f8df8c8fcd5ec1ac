"""Rolling restart of a cluster: the brokers are restarted one at a time, by a command of the operator or by hand.

A broker that is stopped with SIGTERM transfers its leaderships itself, before it ends its session. This module decides
when the next one may be stopped.

Invariants:
* A broker is restarted only when each partition has a leader, and all replicas of other brokers are in sync.
* A broker is back when it has a session with another epoch, and its own metadata, which are at least as new as that
  session, have all its replicas in sync.
* The broker of the controller is restarted last, so that the controller moves once.
* After a failure no other broker is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.cli.support.formatting import count_text
from mansio.errors import ClusterAuthorizationFailed, MansioError, UnsupportedVersion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from mansio.client.admin.cluster import BrokerStatus, ClusterAdmin, PartitionStatus

POLL_S: Final = 0.5
"""Pause between two looks at the cluster."""
PROGRESS_S: Final = 10.0
"""Time between two lines about what is waited for."""
COMMAND_STOP_S_MAX: Final = 5.0
"""Time that an interrupted command has to end."""
STDERR_DESCRIPTOR: Final = 2
PLACEHOLDERS: Final = ("broker", "host")

_PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")
_HOST: Final = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:_-]*")
"""Hosts that a command gets: names and addresses, none of which a program takes for an option."""


class RestartFailed(MansioError):
    """A broker was not restarted, or is not back in time."""


@dataclass(frozen=True, slots=True)
class RestartCommand:
    """The command that restarts a broker. Each argument may contain `{broker}`, the node id, and `{host}`, its
    address. It is not run by a shell."""

    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> RestartCommand:
        """Split a text at spaces, with quotes as in a shell. Raises `ValueError` for one without a program, or with an
        unknown placeholder."""
        arguments = tuple(shlex.split(text))
        if not arguments:
            raise ValueError("it is empty")
        for argument in arguments:
            for name in _PLACEHOLDER.findall(argument):
                if name not in PLACEHOLDERS:
                    raise ValueError(f"there is no placeholder {{{name}}}, but {{broker}} and {{host}}")
        return cls(arguments)

    def arguments_for(self, node_id: int, host: str) -> list[str]:
        """Return the arguments for a broker. Raises `RestartFailed` for a host that is no name or address: it comes
        from the cluster, and must not become an option or a command of another program."""
        if any("{host}" in each for each in self.arguments) and not _HOST.fullmatch(host):
            reason = (
                f"its address {host!r} is no name or IP address"
                if host
                else "its address is unknown: start it first"
            )
            raise RestartFailed(f"the command needs {{host}}, and {reason}")
        values = {"broker": str(node_id), "host": host}
        return [_PLACEHOLDER.sub(lambda found: values[found[1]], each) for each in self.arguments]

    async def run(self, node_id: int, host: str) -> None:
        """Run the command for a broker; its output goes to standard error. Raises `RestartFailed`."""
        arguments = self.arguments_for(node_id, host)
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=STDERR_DESCRIPTOR
            )
        except OSError as error:
            raise RestartFailed(f"{arguments[0]} cannot be run: {error.strerror or error}") from None
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            await _stop(process)
            raise
        if code:
            raise RestartFailed(f"the command ended with exit code {code}: {shlex.join(arguments)}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), COMMAND_STOP_S_MAX)
        except TimeoutError:
            process.kill()
            await process.wait()


def below_min_in_sync(partitions: Iterable[PartitionStatus], node_id: int) -> int:
    """Return the number of partitions that have too few replicas for acks=all while a broker is down."""
    return sum(
        node_id in one.replicas and len(one.replicas) - 1 < (one.min_in_sync_replicas or 1)
        for one in partitions
    )


def restart_order(brokers: Sequence[BrokerStatus], controller_id: int) -> list[BrokerStatus]:
    """Return brokers in the order of their restarts: the controller last."""
    return sorted(brokers, key=lambda one: one.node_id == controller_id)


def obstacle(partitions: Iterable[PartitionStatus], node_id: int) -> str:
    """Return why a broker must not be stopped now; "" if it may."""
    offline = [one for one in partitions if one.is_offline and set(one.in_sync_replicas) != {node_id}]
    lagging = [one for one in partitions if set(one.replicas) - set(one.in_sync_replicas) - {node_id}]
    for found, text in ((offline, "without a leader"), (lagging, "with replicas that are not in sync")):
        if found:
            first = f"{found[0].topic}-{found[0].partition}"
            return f"{count_text(len(found), 'partition')} {text}, the first is {first}"
    return ""


class RollingRestart:
    """Restarts brokers one at a time."""

    def __init__(
        self,
        cluster: ClusterAdmin,
        brokers: Sequence[BrokerStatus],
        *,
        restart: Callable[[int, str], Awaitable[None]],
        report: Callable[[str], None],
        timeout_s: float,
        poll_s: float = POLL_S,
    ) -> None:
        """`restart` is called with the node id and the host of a broker, and returns when it was restarted, or will be
        by hand. `timeout_s`: bound of each wait. `report` is called with lines about the progress."""
        self._cluster = cluster
        self._restart = restart
        self._report = report
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._hosts = {one.node_id: one.host for one in brokers}
        self._last: int | None = None
        self.left = [one.node_id for one in brokers]
        """The brokers that are not restarted yet, the one that is being restarted included."""
        self.done: list[int] = []
        self.stopped: int | None = None
        """The broker whose restart has begun, and which has not been seen in sync since then."""

    async def run(self) -> None:
        """Restart all brokers. Raises `RestartFailed`, and errors of the requests that choose the next one."""
        while self.left:
            node_id = await self._choose()
            await self._restart_broker(node_id)
            self.left.remove(node_id)
            self.done.append(node_id)
            self._last = node_id

    async def _choose(self) -> int:
        status = await self._cluster.status()
        self._hosts |= {one.node_id: one.host for one in status.brokers if one.host}
        known = [one for one in status.brokers if one.node_id in self.left]
        if missing := set(self.left) - {one.node_id for one in known}:
            raise RestartFailed(f"broker {min(missing)} is not registered any more")
        known.sort(key=lambda one: self.left.index(one.node_id))
        return restart_order(known, status.controller_id)[0].node_id

    async def _restart_broker(self, node_id: int) -> None:
        clock = asyncio.get_running_loop().time
        begin = clock()
        watch = _Watch()
        try:
            await self._wait(node_id, lambda one: self._may_stop(one, watch), "it was not stopped")
            self.stopped = node_id
            restart = asyncio.ensure_future(self._restart(node_id, self._hosts[node_id]))
            try:
                await self._wait(node_id, lambda one: self._is_back(one, watch, restart), "it is not back")
            finally:
                restart.cancel()
                await asyncio.gather(restart, return_exceptions=True)
            await self._wait(node_id, self._is_in_sync, "its replicas are not in sync")
            self.stopped = None
        except RestartFailed as error:
            raise RestartFailed(f"broker {node_id}: {error.message}") from None
        await self._return_leaderships(node_id)
        self._report(f"broker {node_id}: restarted and in sync after {clock() - begin:.0f} s")

    async def _wait(self, node_id: int, look: Callable[[int], Awaitable[str]], failure: str) -> None:
        """Wait until `look` returns "", not what is waited for. Requests that fail are repeated."""
        clock = asyncio.get_running_loop().time
        end, report_at = clock() + self._timeout_s, clock() + min(PROGRESS_S, self._timeout_s / 2)
        while True:
            try:
                missing = await look(node_id)
            except RestartFailed:
                raise
            except MansioError as error:
                missing = error.message
            if not missing:
                return
            now = clock()
            if now >= end:
                raise RestartFailed(f"{failure} after {self._timeout_s:.0f} s: {missing}")
            if now >= report_at:
                self._report(f"broker {node_id}: waits: {missing}")
                report_at = now + PROGRESS_S
            await asyncio.sleep(self._poll_s)

    async def _may_stop(self, node_id: int, watch: _Watch) -> str:
        """Return what is missing until the broker may be stopped, and note its session."""
        if missing := obstacle(await self._cluster.partitions(broker=self._last), node_id):
            return missing
        seen = await self._session(node_id)
        if seen is None:
            return "it does not answer"
        watch.begin(seen)
        return ""

    async def _is_back(self, node_id: int, watch: _Watch, restart: asyncio.Future[None]) -> str:
        """Return what is missing until the broker has a new session, and the command has ended."""
        watch.look(await self._session(node_id))
        if restart.done():
            restart.result()
        elif watch.is_back:
            return "the command has not ended"
        return "" if watch.is_back else watch.missing

    async def _is_in_sync(self, node_id: int) -> str:
        own = [one for one in await self._cluster.partitions(broker=node_id) if node_id in one.replicas]
        lagging = sum(node_id not in one.in_sync_replicas for one in own)
        return f"{lagging:,} of {count_text(len(own), 'replica')} not in sync" if lagging else ""

    async def _session(self, node_id: int) -> _Session | None:
        """Return the session of a broker; None if it does not answer, although it has one."""
        for one in await self._cluster.health([node_id]):
            if one.error is None:
                return _Session(one.is_session_held, one.broker_epoch)
            if isinstance(one.error, ClusterAuthorizationFailed):
                raise RestartFailed(one.error.message)
            return _Session(is_held=True) if isinstance(one.error, UnsupportedVersion) else None
        return _Session(is_held=False)

    async def _return_leaderships(self, node_id: int) -> None:
        from mansio.client.types import TopicPartition

        try:
            due = [
                TopicPartition(one.topic, one.partition)
                for one in await self._cluster.partitions(broker=node_id)
                if one.replicas[0] == node_id != one.leader
            ]
            results = await self._cluster.elect_leaders("preferred", due) if due else []
        except MansioError as error:
            self._report(f"broker {node_id}: {error.message}; for its leaderships: mansio cluster elect")
            return
        if failed := sum(one.outcome == "failed" for one in results):
            self._report(
                f"broker {node_id}: {count_text(failed, 'leadership')} could not return; later: mansio cluster elect"
            )


class _Session(NamedTuple):
    """What is known of the session of a broker. `epoch`: None without a session, and of an older broker."""

    is_held: bool
    epoch: int | None = None


class _Watch:
    """Whether a broker was restarted, from what is seen of its session. One of an older version has no epoch: it must
    have been away, or have an epoch afterwards."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._was_away = False
        self.is_back = False
        self.missing = ""

    def begin(self, seen: _Session) -> None:
        """Note the session before the restart."""
        self._before = seen.epoch
        self._was_away = not seen.is_held

    def look(self, seen: _Session | None) -> None:
        """Note what is seen during the restart; None: the broker does not answer."""
        self.is_back = False
        if seen is None or not seen.is_held:
            self._was_away = True
            self.missing = "it has no session, or does not answer"
        elif seen.epoch == self._before and not (seen.epoch is None and self._was_away):
            self.missing = "it was not stopped yet"
        else:
            self.is_back = True
