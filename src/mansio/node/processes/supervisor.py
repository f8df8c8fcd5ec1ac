"""Supervisor of the broker processes of one node, and of an etcd member.

It has no data and no port of clients. etcd starts first, then all brokers; they stop in reverse order.

Invariants:
* The brokers and etcd end with the supervisor, however it ends. A supervisor that is started again waits until they
  have ended, which their locks show.
* At most one supervisor uses a directory.
* A broker that exits is restarted after a delay, which grows; a restart of etcd restarts no broker.
* A process that is not started any more had no replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.api.asgi.server import HttpServer
from mansio.broker.maintenance.data_dir_format import claim_data_dir_format
from mansio.broker.maintenance.data_dir_mode import (
    SINGLE_NODE_FILE_NAME,
    SUPERVISOR_LOCK_FILE,
    MovedTo,
    cluster_of,
    write_moved_to,
)
from mansio.config.addresses import Address
from mansio.config.listeners import parse_listeners
from mansio.config.settings import Origin
from mansio.errors import ConfigError, DataDirectoryLocked, Unavailable
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.child_process import ChildProcess, RelayedOutput, exit_reason
from mansio.host.clock import HostRandom
from mansio.host.disk import HostDisk
from mansio.host.free_ports import is_free
from mansio.host.port_owner import port_in_use_message
from mansio.host.threads import BackgroundThread
from mansio.logs import fields
from mansio.metadata.etcd.store import EtcdStore
from mansio.metadata.image import MetadataImage
from mansio.metadata.single_node_import import check_single_node, import_single_node
from mansio.metadata.sqlite.store import SqliteStore
from mansio.node.broker import LOCK_FILE
from mansio.node.cluster_bootstrap import check_cluster
from mansio.node.etcd_member.executable import find_program
from mansio.node.etcd_member.member import EtcdMember
from mansio.node.etcd_settings import create_own_member, etcd_config
from mansio.node.processes.broker_process import (
    LOG_FAILED_PATTERN,
    READY_LINE_PATTERN,
    BrokerProcess,
    run_all,
    run_until_first,
)
from mansio.node.processes.control_channel import ChannelResponse, SupervisorEnd
from mansio.node.processes.monitoring import monitoring_app
from mansio.node.processes.plan import directory_of, without_leaving, write_layout
from mansio.node.processes.restarts import RestartPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from mansio.config.settings import Settings
    from mansio.node.etcd_member.command import MemberPlan
    from mansio.node.processes.plan import NodePlan, ProcessPlan
    from mansio.ports import Disk, DiskLock

logger = logging.getLogger(__name__)

EARLIER_PROCESSES_S_MIN: Final = 30.0
"""Wait for the processes of an earlier supervisor, which stop when it has ended: this, or longer if their stop may take
longer."""
POLL_INTERVAL_S: Final = 0.05
CLOSE_S_MAX: Final = 10.0
"""Time that a broker has for its stop beyond `shutdown_drain_ms`; then it is killed, and its next start recovers."""
HANG_CHECK_SHARE: Final = 0.25
"""Pause between two checks of a broker's event loop, in parts of the time after which it counts as hung."""


class SupervisedBroker:
    """One broker process and its control channel."""

    def __init__(
        self, plan: ProcessPlan, command: Sequence[str], on_line: Callable[[int, bytes], object]
    ) -> None:
        """`on_line`: gets the lines that the process writes, with its node id."""
        self.plan = plan
        self._channel: SupervisorEnd | None = None
        output = RelayedOutput(partial(on_line, plan.node_id), [READY_LINE_PATTERN, LOG_FAILED_PATTERN])
        self.process = BrokerProcess(
            ChildProcess(command, output),
            LoggedReports(plan.node_id),
            partial(RestartPolicy, restarts_max=None, restarts_stopped=True),
            start_child=self._start_child,
        )

    @property
    def is_running(self) -> bool:
        return self.process.is_running

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def restarts(self) -> int:
        return self.process.restarts

    async def _start_child(self, child: ChildProcess) -> None:
        self.close()
        channel = self._channel = SupervisorEnd()
        try:
            await child.start(channel.broker_descriptor)
        finally:
            channel.broker_has_started()

    async def get(self, path: str, within_s: float) -> ChannelResponse:
        """Ask the broker for a path of its HTTP API. Raises `Unavailable`."""
        if self._channel is None or not self.is_running:
            raise Unavailable("it does not run")
        return await self._channel.get(path, within_s)

    async def kill_when_hung(self, hung_s: float) -> None:
        """Send SIGKILL to the broker, which is then restarted, whenever it was ready and its event loop has not
        responded for `hung_s`. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(hung_s * HANG_CHECK_SHARE)
            if not (self.process.addresses and self.is_running):
                continue
            pid = self.process.pid
            try:
                await self.get("/health/live", hung_s)
            except Unavailable as error:
                if self.is_running and self.process.pid == pid:
                    logger.error(
                        "broker_process_hung", extra=fields(node=self.plan.node_id, pid=pid, reason=error)
                    )
                    self.process.kill()

    async def start(self) -> None:
        """Start the broker; returns when it is ready. Raises `Unavailable` if it ends before."""
        if not await self.process.start():
            code = await self.process.wait()
            raise Unavailable(f"broker {self.plan.node_id} did not start: {exit_reason(code)}")

    def close(self) -> None:
        """Close the control channel."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class LoggedReports:
    """Reports about one broker process, as log lines."""

    def __init__(self, node_id: int) -> None:
        self._node_id = node_id

    def starting(self, pid: int) -> None:
        logger.info("broker_process_starting", extra=fields(node=self._node_id, pid=pid))

    def ready(self, after_s: float) -> None:
        logger.info("broker_process_ready", extra=fields(node=self._node_id, after_s=round(after_s, 2)))

    def ended(self, pid: int, code: int, last_lines: list[str]) -> None:
        del last_lines  # they are on standard error
        logger.error(
            "broker_process_exited", extra=fields(node=self._node_id, pid=pid, ended=exit_reason(code))
        )

    def restarting(self, delay_s: float) -> None:
        logger.info("broker_process_restarts", extra=fields(node=self._node_id, in_s=delay_s))

    def staying_down(self, reason: str) -> None:
        logger.error("broker_process_not_restarted", extra=fields(node=self._node_id, reason=reason))

    def not_started(self, error: OSError) -> None:
        logger.error("broker_process_start_failed", extra=fields(node=self._node_id, reason=error))


class Supervisor:
    """Supervisor of the processes of one plan. The methods are called in the order of their definitions."""

    def __init__(
        self,
        plan: NodePlan,
        settings: Settings,
        broker_settings: Settings,
        command: Callable[[ProcessPlan], Sequence[str]],
    ) -> None:
        """Take the settings of the supervisor and, as `broker_settings`, of the first broker. `command` returns the
        command line of a broker process."""
        self.plan = plan
        self._settings = settings
        self._broker_settings = broker_settings
        self._disk = HostDisk()
        self._stack = contextlib.AsyncExitStack()
        self._member: EtcdMember | None = None
        self._is_json = settings.log_format == "json"
        self.monitoring_address: Address | None = None
        """Address of health checks and metrics, from the start on; None if there is none."""
        self.brokers = {
            each.node_id: SupervisedBroker(each, command(each), self._relay) for each in plan.processes
        }

    def _relay(self, node_id: int, line: bytes) -> None:
        """Write a line of a broker to standard error, unless it is the one that is for the supervisor."""
        if READY_LINE_PATTERN.match(line) is None:
            # As for the lines of a broker: whoever reads the log may have ended.
            with contextlib.suppress(OSError):
                sys.stderr.buffer.write(labelled(line, node_id, is_json=self._is_json))
                sys.stderr.buffer.flush()

    async def start(self) -> None:
        """Start all processes; returns when all brokers are ready. Raises `MansioError` with the reason of a failure,
        `ConfigError` before anything is changed if there is no etcd program."""
        settings, plan, disk = self._settings, self.plan, self._disk
        member = await self._create_member()
        disk.make_directory(plan.directory)
        lock = self._lock()
        self._stack.callback(lock.release)
        await self._listen(member)
        await self._wait_for_earlier_processes(None if member is None else member.plan)
        self._warn_about_settings()
        if plan.imports:
            async with self._single_node() as source:
                await check_single_node(source, plan.layout.first_node_id)
        if plan.member is not None and not plan.leaving:
            write_layout(disk, plan.directory, plan.layout)  # before etcd uses its ports
        if member is not None:
            await member.start(settings.etcd_start_timeout_ms / 1000)
            self._member = member
        await self._check_cluster()
        cluster_id = await self._import_single_node() if plan.imports else None
        if plan.leaving:
            await self._check_drained(plan.leaving)
        write_layout(disk, plan.directory, without_leaving(plan))
        if cluster_id is not None:
            write_moved_to(disk, plan.directory, MovedTo(cluster_id, plan.layout.first_node_id))
        for each in plan.processes:
            disk.make_directory(each.directory)
        await run_all(each.start() for each in self.brokers.values())
        await self.warn_about_hosts()

    async def _create_member(self) -> EtcdMember | None:
        if self.plan.member is not None:
            program = await asyncio.to_thread(find_program, self._settings.etcd_binary)
            return EtcdMember(self.plan.member, program)
        return await create_own_member(self._settings) if self._settings.etcd_join else None

    def _lock(self) -> DiskLock:
        try:
            return self._disk.lock(f"{self.plan.directory}/{SUPERVISOR_LOCK_FILE}")
        except DataDirectoryLocked as error:
            raise ConfigError(
                f"data directory {self.plan.directory} is in use by another supervisor: use --data"
            ) from error

    async def _listen(self, member: EtcdMember | None) -> None:
        """Answer health checks, also while the brokers recover their logs."""
        if (address := self._settings.supervisor_address) is None:
            return
        server = HttpServer(monitoring_app(self.brokers, member), *address)
        try:
            self.monitoring_address = Address(*await server.start())
        except OSError as error:
            reason = port_in_use_message(*address) if error.errno == errno.EADDRINUSE else str(error)
            raise ConfigError(f"supervisor_listener: {reason}") from error
        self._stack.push_async_callback(server.stop)

    async def _wait_for_earlier_processes(self, member: MemberPlan | None) -> None:
        """Wait until the processes of a supervisor that was killed have ended. Raises `ConfigError`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + max(EARLIER_PROCESSES_S_MIN, self._stop_s)
        is_logged = False
        while (reason := self._in_use(member)) is not None:
            if loop.time() >= end:
                raise ConfigError(reason)
            if not is_logged:
                logger.warning("waiting_for_earlier_processes", extra=fields(reason=reason))
                is_logged = True
            await asyncio.sleep(POLL_INTERVAL_S)

    @property
    def _stop_s(self) -> float:
        """Maximum time that a broker needs for its stop."""
        return self._settings.shutdown_drain_ms / 1000 + CLOSE_S_MAX

    def _warn_about_settings(self) -> None:
        settings, name = self._settings, "default_replication_factor"
        if self.plan.member is None or settings.default_replication_factor == 1:
            return
        if settings.origin(name) is not Origin.DEFAULT:
            reason = "1 is used: all brokers are on one host, as long as --processes runs an etcd of its own"
            logger.warning("setting_without_effect", extra=fields(name=name, reason=reason))

    def _in_use(self, member: MemberPlan | None) -> str | None:
        for each in self.plan.processes:
            if is_locked(self._disk, f"{each.directory}/{LOCK_FILE}"):
                return f"data directory {each.directory} is in use by another broker: use --data"
            if (taken := taken_kafka_port(each)) is not None:
                return taken
        if (taken := taken_port(self._broker_settings)) is not None:
            return taken
        if member is not None:
            host = member.listen_host
            for port in (member.own_address.peer_port, member.own_address.client_port):
                if not is_free(host, port):
                    taken = port_in_use_message(host, port)
                    return f"{taken}, and etcd in {self.plan.directory} needs it: stop that process"
        return None

    @contextlib.asynccontextmanager
    async def _single_node(self) -> AsyncIterator[SqliteStore]:
        """Open the metadata of the single node, whose directory is that of the first process. Its broker cannot start
        meanwhile."""
        plan, disk = self.plan, self._disk
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(disk.lock(f"{plan.directory}/{LOCK_FILE}").release)
            data_format = claim_data_dir_format(disk, plan.directory)

            def before_mark(_operations: object) -> None:
                data_format.require_current()  # older versions would ignore the mark

            scheduler = AsyncioScheduler(asyncio.get_running_loop())
            thread = BackgroundThread(scheduler.call_from_thread, name="mansio-files")
            stack.callback(thread.close)
            source = await asyncio.to_thread(
                SqliteStore.open,
                f"{plan.directory}/{SINGLE_NODE_FILE_NAME}",
                thread,
                scheduler.promise,
                before_commit=before_mark,
            )
            stack.push_async_callback(source.close)
            yield source

    @contextlib.asynccontextmanager
    async def _cluster_store(self) -> AsyncIterator[EtcdStore]:
        store = await EtcdStore.open(etcd_config(self._broker_settings), HostRandom())
        try:
            yield store
        finally:
            await store.close()

    async def _import_single_node(self) -> str:
        """Move the metadata of the single node to etcd; returns the cluster id. Its broker never starts alone again."""
        async with self._single_node() as source, self._cluster_store() as target:
            return await import_single_node(source, target, self.plan.layout.first_node_id, HostRandom())

    async def _check_cluster(self) -> None:
        """Raise `ConfigError` if a directory belongs to a cluster that is not in etcd, before a broker with a new
        directory creates another one."""
        layout, disk = self.plan.layout, self._disk
        directories = [directory_of(self.plan.directory, name) for name in layout.directories]
        if not any(cluster_of(disk, each) for each in directories):
            return
        async with self._cluster_store() as store:
            for node_id, directory in enumerate(directories, layout.first_node_id):
                try:
                    await check_cluster(disk, directory, node_id, self._settings.cluster_id, store)
                except ConfigError as error:
                    if self.plan.member is None:
                        raise
                    place = self.plan.member.data_directory
                    raise ConfigError(f"{error.message} (the data of that etcd was in {place})") from error

    async def warn_about_hosts(self) -> None:
        """Log a warning if there are too few hosts for the default replication factor."""
        wanted = self._broker_settings.default_replication_factor
        if wanted == 1:
            return
        async with self._cluster_store() as store:
            state = await MetadataImage.load(store, self._settings.cluster_id, HostRandom())
        hosts = {state.host_of(node_id) for node_id in state.brokers}
        if len(hosts) < wanted:
            reason = (
                "topics without a replication factor of their own cannot be created, internal ones neither"
            )
            known = fields(hosts=len(hosts), default_replication_factor=wanted, reason=reason)
            logger.warning("too_few_hosts", extra=known)

    async def _check_drained(self, leaving: Sequence[int]) -> None:
        """Raise `ConfigError` if a broker that is not started any more has replicas."""
        async with self._cluster_store() as store:
            state = await MetadataImage.load(store, self._settings.cluster_id, HostRandom())
        for node_id in leaving:
            topics = (*state.topics.values(), *state.unfinished_topics.values())
            count = sum(node_id in one.replicas for topic in topics for one in topic.partitions)
            if count:
                raise ConfigError(
                    f"--processes: broker {node_id} of {self.plan.directory} has {count} replica(s): start "
                    f"{len(self.plan.layout.directories)} processes, and first drain it with "
                    f"`mansio cluster drain {node_id}`"
                )

    async def watch(self, hung_s: float | None = None) -> None:
        """Restart each broker that exits, and those whose event loop does not respond for `hung_s`; None: they are left
        alone. Returns when no broker is left that is restarted."""
        watching = run_all(each.process.watch() for each in self.brokers.values())
        if hung_s is None:
            await watching
        else:
            hangs = run_all(each.kill_when_hung(hung_s) for each in self.brokers.values())
            await run_until_first(watching, hangs)

    def reload(self) -> None:
        """Let all brokers read their certificates again."""
        for each in self.brokers.values():
            each.process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Send SIGKILL to every broker."""
        for each in self.brokers.values():
            each.process.kill()

    async def stop(self) -> int:
        """Stop all brokers, then etcd. Returns the exit code: 1 if a broker did not stop cleanly."""
        running = [each for each in self.brokers.values() if each.is_running]
        if running:
            logger.info("broker_processes_stopping", extra=fields(running=len(running)))
        codes = await asyncio.gather(*(each.process.stop(self._stop_s) for each in running))
        for each, code in zip(running, codes, strict=True):
            if code:
                logger.error(
                    "broker_process_not_stopped_cleanly",
                    extra=fields(node=each.plan.node_id, ended=exit_reason(code)),
                )
        if self._member is not None:
            await self._member.stop()
        for each in self.brokers.values():
            each.close()
        await self._stack.aclose()
        return int(any(codes))


def is_locked(disk: Disk, path: str) -> bool:
    """Whether another process has taken the lock at `path`."""
    if not disk.exists(path):
        return False
    try:
        disk.lock(path).release()
    except DataDirectoryLocked:
        return True
    return False


def taken_port(settings: Settings) -> str | None:
    """Return which process serves one of the ports that brokers share: it would get a part of the connections. None if
    none does."""
    for flag, address in (
        ("--http", settings.http_address),
        ("--registry", settings.registry_address),
        ("--grpc", settings.grpc_address),
        ("--sqs", settings.sqs_address),
    ):
        if address is not None and not is_free(address.host, address.port):
            return f"{port_in_use_message(address.host, address.port)}: use {flag} for another port"
    return None


def taken_kafka_port(plan: ProcessPlan) -> str | None:
    """Return which process listens on a port that the broker needs for the Kafka protocol; None if none does."""
    for address in parse_listeners("listeners", plan.changes["listeners"]).values():
        if address.port and not is_free(*address):
            return f"{port_in_use_message(*address)}: use --kafka for other ports"
    return None


def labelled(line: bytes, node_id: int, *, is_json: bool) -> bytes:
    """Return a line of a broker with its node id: a field of a JSON object, or the beginning of the line."""
    if is_json:
        return b'{"process": %d, ' % node_id + line[1:] if line.startswith(b'{"') else line
    return b"[%d] " % node_id + line
