"""Process of one broker: start until it is ready, restart when it exits, stop.

Invariant: at most one process runs at a time, and none after `stop` has returned.
"""

from __future__ import annotations

import asyncio
import re
import signal
from typing import TYPE_CHECKING, Any, Final, Protocol

from mansio.host.child_process import ChildProcess
from mansio.node.processes.restarts import StayDown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from mansio.node.processes.restarts import RestartPolicy

POLL_INTERVAL_S: Final = 0.02
SHOWN_LOG_LINES: Final = 15
LOG_FAILED_PATTERN: Final = re.compile(rb' ERROR log_failed |"event": "log_failed"')
"""The event `log_failed` in a broker's log lines, in the text format and in JSON."""
READY_LINE_PATTERN: Final = re.compile(rb"^mansio \S+ ready (kafka=\S+ .*)$")


class ProcessReports(Protocol):
    """Gets what happens to one broker process."""

    def starting(self, pid: int) -> None: ...

    def ready(self, after_s: float) -> None: ...

    def ended(self, pid: int, code: int, last_lines: list[str]) -> None:
        """Report that the process has ended by itself. `last_lines`: the end of its output, if the code is not 0."""

    def restarting(self, delay_s: float) -> None: ...

    def staying_down(self, reason: str) -> None: ...

    def not_started(self, error: OSError) -> None:
        """Report that the process could not be started; it is tried again as after an exit."""


class BrokerProcess:
    """The process of one broker. `start` comes first, then `watch`."""

    def __init__(
        self,
        child: ChildProcess,
        reports: ProcessReports,
        policy: Callable[[], RestartPolicy],
        *,
        start_child: Callable[[ChildProcess], Awaitable[None]] = ChildProcess.start,
        is_in_use: Callable[[], bool] = lambda: False,
    ) -> None:
        """`start_child` starts the child. `is_in_use`: whether another process uses the broker's data directory."""
        self._child = child
        self._reports = reports
        self._policy = policy
        self._start_child = start_child
        self._is_in_use = is_in_use
        self.restarts = 0
        """Number of restarts after the process ended by itself."""
        self.addresses: dict[str, str] = {}
        """Fields of the line with which the last start reported that the broker is ready; empty before."""

    @property
    def pid(self) -> int:
        """The process id of the last start."""
        return self._child.pid

    @property
    def is_running(self) -> bool:
        return self._child.is_running

    def last_lines(self) -> list[str]:
        """Return the end of the output since the last start."""
        return self._child.tail(SHOWN_LOG_LINES)

    async def wait(self) -> int:
        """Wait until the process has ended; returns its exit code, negative for the signal that ended it."""
        return await self._child.wait()

    async def start(self, within_s: float | None = None) -> bool:
        """Start the process; returns whether it was ready before it exited, or before `within_s` were over."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        self.addresses = {}
        await self._start_child(self._child)
        self._reports.starting(self.pid)
        while (found := await self._child.find(READY_LINE_PATTERN)) is None:
            if not self.is_running or (within_s is not None and loop.time() - begun > within_s):
                return False
            await asyncio.sleep(POLL_INTERVAL_S)
        words = found[1].decode(errors="replace").split()
        self.addresses = dict(word.split("=", 1) for word in words if "=" in word)
        self._reports.ready(loop.time() - begun)
        return True

    async def watch(self, start_within_s: float | None = None) -> None:
        """Restart the process whenever it ends. Returns when the policy decides that it stays down."""
        loop = asyncio.get_running_loop()
        policy = self._policy()
        while True:
            code = await self._child.wait()
            self._reports.ended(self.pid, code, self.last_lines() if code else [])
            log_failed = await self._child.find(LOG_FAILED_PATTERN) is not None
            decision = policy.on_exit(code, log_failed=log_failed, now_s=loop.time())
            if not isinstance(decision, StayDown):
                self._reports.restarting(decision.delay_s)
                await asyncio.sleep(decision.delay_s)
                if self._is_in_use():
                    decision = StayDown("another process uses its data directory")
            if isinstance(decision, StayDown):
                self._reports.staying_down(decision.reason)
                return
            try:
                await self.start(start_within_s)
                self.restarts += 1
            except OSError as error:  # no memory, or too many processes
                self._reports.not_started(error)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; no effect if it has ended."""
        self._child.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the process; no effect if it has ended."""
        self._child.send_signal(signal.SIGKILL)

    async def stop(self, wait_s: float) -> int | None:
        """Send SIGTERM, and SIGKILL after `wait_s`; returns the exit code when the process has ended."""
        return await self._child.stop(wait_s)


async def run_all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines concurrently. The first error cancels the others, and is raised when they have ended."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_until_first(work: Coroutine[Any, Any, Any], other: Coroutine[Any, Any, Any]) -> bool:
    """Run both coroutines until the first one completes, and cancel the other one. Returns whether `work` has
    completed; raises the error of the completed one.
    """
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(other)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return tasks[0] in done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
