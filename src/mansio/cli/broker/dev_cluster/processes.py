"""Processes of `mansio dev-cluster`: etcd is started first, then all brokers; they are stopped in reverse order.

Invariants:
* When `run_until_stopped` returns, all processes that it started have ended.
* If a broker exits by itself, its last log lines are printed, and it is restarted if `restarts` decides so.
* etcd runs as long as a broker does, also a broker that the user has started with the printed command.
* The first signal stops all processes cleanly, the second one kills them.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mansio.cli.broker.connection_lines import print_connection
from mansio.cli.broker.dev_cluster.plan import data_directories_in_use, mansio_command
from mansio.errors import SaslAuthenticationFailed, Unavailable
from mansio.host.child_process import ChildProcess, exit_reason
from mansio.node.etcd_member.executable import find_program
from mansio.node.etcd_member.member import EtcdMember
from mansio.node.processes.broker_process import BrokerProcess, run_all, run_until_first
from mansio.node.processes.restarts import FORCED_EXIT_CODE, RestartPolicy
from mansio.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from mansio.cli.broker.dev_cluster.plan import BrokerPlan, ClusterPlan
    from mansio.cli.broker.dev_cluster.protection import ClusterProtection
    from mansio.node.protected_start import ClientFiles

    WaitUntilFormed = Callable[[ClusterPlan, ClientFiles | None], Coroutine[Any, Any, None]]

ETCD_START_S_MAX: Final = 60.0
BROKER_START_S_MAX: Final = 90.0
FORMED_S_MAX: Final = 60.0
BROKER_STOP_S_MAX: Final = 20.0
ETCD_STOP_S_MAX: Final = 2.0
"""Timeout of the stop of an etcd member. Members that stop at the same time would otherwise wait for each other."""

POLL_INTERVAL_S: Final = 0.02
IN_USE_POLL_INTERVAL_S: Final = 0.5


def print_status(text: str) -> None:
    """Print progress or an error to standard error."""
    print(text, file=sys.stderr, flush=True)


class PrintedReports:
    """Reports about one broker, on standard error."""

    def __init__(self, plan: ClusterPlan, broker: BrokerPlan) -> None:
        self._plan = plan
        self._broker = broker

    def starting(self, pid: int) -> None:
        print_status(f"broker {self._broker.node_id} starting: pid {pid}, log {self._broker.log_path}")

    def ready(self, after_s: float) -> None:
        broker = self._broker
        print_status(
            f"broker {broker.node_id} ready after {after_s:.1f} s: kafka={broker.kafka} http={broker.http}"
        )

    def ended(self, pid: int, code: int, last_lines: list[str]) -> None:
        print_status(f"broker {self._broker.node_id} (pid {pid}) has ended: {exit_reason(code)}")
        if code:
            self.print_log_end(last_lines)

    def restarting(self, delay_s: float) -> None:
        print_status(f"broker {self._broker.node_id} restarts in {delay_s:g} s")

    def staying_down(self, reason: str) -> None:
        again = shlex.join(["mansio", *self._plan.arguments(self._broker)])
        print_status(
            f"broker {self._broker.node_id} is not restarted ({reason}); start it again with: {again}"
        )

    def not_started(self, error: OSError) -> None:
        print_status(f"broker {self._broker.node_id} could not be started: {error}")

    def print_log_end(self, last_lines: list[str]) -> None:
        """Print the end of the broker's log."""
        lines = last_lines or ["(it wrote nothing)"]
        print_status("\n".join([f"the end of {self._broker.log_path}:", *(f"    {line}" for line in lines)]))


class DevCluster:
    """The processes of one plan. `command`: the command line of `mansio`. `formed`: coroutine that returns when all
    brokers have registered. `restart`: whether brokers that exit are restarted.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        command: Sequence[str],
        formed: WaitUntilFormed,
        *,
        restart: bool,
        protection: ClusterProtection | None = None,
    ) -> None:
        self.plan = plan
        self.client_files: ClientFiles | None = None
        """What clients need to connect to a protected cluster, when `start` has returned."""
        self._protection = protection
        self._formed = formed
        self._members: list[EtcdMember] = []
        self._reports = {broker: PrintedReports(plan, broker) for broker in plan.brokers}
        self._brokers = {
            broker: BrokerProcess(
                ChildProcess([*command, *plan.arguments(broker)], broker.log_path),
                self._reports[broker],
                partial(RestartPolicy, enabled=restart),
                is_in_use=partial(self._is_in_use, broker),
            )
            for broker in plan.brokers
        }

    def _is_in_use(self, broker: BrokerPlan) -> bool:
        return broker.directory in data_directories_in_use(self.plan.directory)

    async def start(self) -> None:
        """Start all processes; returns when topics can be created on all brokers. Raises `MansioError` with the reason
        of a failure.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        program = await asyncio.to_thread(find_program)
        count = len(self.plan.members)
        print_status(f"etcd {program.version} ({program.path}): starting {_count_text(count, 'member')}")
        self._members = [EtcdMember(member, program) for member in self.plan.members]
        await run_all(member.start(ETCD_START_S_MAX) for member in self._members)
        print_status(f"etcd ready after {loop.time() - begun:.1f} s: {self.plan.etcd}")
        if self._protection is not None:
            self.client_files = await self._protection.create_first_user()
        await run_all(self._start_broker(broker, child) for broker, child in self._brokers.items())
        await run_until_first(self._formed(self.plan, self.client_files), self._until_one_ends())

    async def _until_one_ends(self) -> None:
        """Raise `Unavailable` when a broker exits."""
        waiting = {asyncio.ensure_future(child.wait()): broker for broker, child in self._brokers.items()}
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        ended = done.pop()
        broker = waiting[ended]
        self._reports[broker].print_log_end(self._brokers[broker].last_lines())
        raise Unavailable(
            f"broker {broker.node_id} ended before the cluster was ready: {exit_reason(ended.result())}"
        )

    async def _start_broker(self, broker: BrokerPlan, process: BrokerProcess) -> None:
        if not await process.start(BROKER_START_S_MAX):
            self._reports[broker].print_log_end(process.last_lines())
            if process.is_running:
                raise Unavailable(f"broker {broker.node_id} was not ready after {BROKER_START_S_MAX:g} s")
            raise Unavailable(f"broker {broker.node_id} did not start: {exit_reason(await process.wait())}")

    def ready_line(self) -> str:
        """Return the line with all addresses that is printed for programs when the cluster is ready."""
        listeners = (
            f"kafka={self.plan.bootstrap_servers} http={','.join(one.http for one in self.plan.brokers)}"
        )
        pids = ",".join(str(child.pid) for child in self._brokers.values())
        locations = f"etcd={self.plan.etcd} data={self.plan.directory} pids={pids}"
        return f"mansio {__version__} dev-cluster ready {listeners} {locations}"

    async def watch(self) -> None:
        """Restart or report each broker that exits. Returns when no broker is left, including those that the user
        started again.
        """
        await run_all(process.watch(BROKER_START_S_MAX) for process in self._brokers.values())
        while True:
            if not data_directories_in_use(self.plan.directory):
                return
            await asyncio.sleep(IN_USE_POLL_INTERVAL_S)

    def kill(self) -> None:
        """Send SIGKILL to every broker."""
        for process in self._brokers.values():
            process.kill()

    async def stop(self) -> None:
        """Stop all brokers, then etcd."""
        running = [one for one in self._brokers.items() if one[1].is_running]
        if running:
            print_status(f"stopping {_count_text(len(running), 'broker')}")
        await asyncio.gather(*(self._stop_broker(broker, process) for broker, process in running))
        await asyncio.gather(*(member.stop(ETCD_STOP_S_MAX) for member in self._members))

    async def _stop_broker(self, broker: BrokerPlan, process: BrokerProcess) -> None:
        code = await process.stop(BROKER_STOP_S_MAX)
        if code:
            print_status(f"broker {broker.node_id} did not stop cleanly: {exit_reason(code)}")
            self._reports[broker].print_log_end(process.last_lines())


async def run_until_stopped(
    plan: ClusterPlan,
    *,
    command: Sequence[str] | None = None,
    formed: WaitUntilFormed | None = None,
    restart: bool = True,
    protection: ClusterProtection | None = None,
) -> int:
    """Run a dev-cluster until a signal arrives or no broker is left, then stop all processes. Returns the exit code.

    With `restart`, brokers that exit are restarted, within the limits of `RestartPolicy`. `formed` waits until all
    brokers have registered; `command` is the command line of `mansio`. `protection`: of a protected plan, with its
    files.
    """
    cluster = DevCluster(
        plan,
        command or mansio_command(),
        formed or _wait_until_formed,
        restart=restart,
        protection=protection,
    )
    stop = asyncio.Event()
    is_impatient = False

    def on_signal() -> None:
        nonlocal is_impatient
        if stop.is_set():
            is_impatient = True
            cluster.kill()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        is_over = await run_until_first(_run_cluster(cluster, protection), stop.wait())
    finally:
        await cluster.stop()
    if not is_over:
        return FORCED_EXIT_CODE if is_impatient else 0
    print_status("no broker is left")
    return 1


async def _run_cluster(cluster: DevCluster, protection: ClusterProtection | None) -> None:
    """Start the cluster, print its ready line and how to connect, and watch it until no broker is left."""
    await cluster.start()
    print(cluster.ready_line(), flush=True)
    if protection is None or cluster.client_files is None:
        print_status(f"for other commands: export MANSIO_BOOTSTRAP_SERVERS={cluster.plan.bootstrap_servers}")
    else:
        print_connection(cluster.client_files, cluster.plan.bootstrap_servers, protection.new_password)
    await cluster.watch()


async def _wait_until_formed(plan: ClusterPlan, files: ClientFiles | None) -> None:
    """Return when the cluster's metadata has all brokers. Raises `Unavailable` after `FORMED_S_MAX`.

    `files`: of a protected cluster. Without the present password of its first user nobody can look. Then it is enough
    that each broker has registered before its ready line.
    """
    from mansio.client import connect
    from mansio.net.security_settings import UNSECURED

    security = UNSECURED if files is None else files.connect_arguments()
    if security is None:
        return
    seen = 0
    try:
        async with (
            asyncio.timeout(FORMED_S_MAX),
            connect(plan.bootstrap_servers, client_id="dev-cluster", **security) as client,
        ):
            while True:
                seen = len((await client.admin.describe_cluster()).brokers)
                if seen == len(plan.brokers):
                    return
                await asyncio.sleep(POLL_INTERVAL_S)
    except SaslAuthenticationFailed as error:
        print_status(f"{error.message}: the password was changed, and its file was not")
    except TimeoutError:
        raise Unavailable(
            f"after {FORMED_S_MAX:g} s {seen} of {len(plan.brokers)} brokers have registered"
        ) from None


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
