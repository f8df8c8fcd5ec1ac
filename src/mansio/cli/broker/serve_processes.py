"""`mansio serve --processes`: several brokers on this machine, and an etcd member, under one supervisor.

Invariants:
* The first SIGTERM or SIGINT stops the brokers, then etcd; the second one kills the brokers.
* The `ready` line is printed when all brokers are ready.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from mansio.cli.broker.service_manager import SystemdNotifier, has_terminal, send_heartbeats
from mansio.cli.support.common import usage_error
from mansio.version import __version__

if TYPE_CHECKING:
    import asyncio

    from mansio.cli.broker.config import GivenFlags
    from mansio.config.settings import Settings
    from mansio.logs import LineHandler
    from mansio.node.processes.plan import ProcessPlan
    from mansio.node.processes.supervisor import Supervisor

MANAGER_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Variables of systemd that are for the supervisor only."""


def serve_processes(given: GivenFlags, count: int) -> int:
    """Run `count` brokers until a signal arrives. Returns the exit code."""
    import asyncio

    from mansio import logs
    from mansio.host import file_descriptors
    from mansio.host.disk import HostDisk
    from mansio.host.extras import require_extra
    from mansio.node.processes.plan import plan_node

    if not sys.platform.startswith("linux"):
        usage_error("several processes can share ports on Linux only", "--processes")
    if given.is_secure:
        usage_error("it makes certificates for a single broker; name files of your own", "--secure")
    settings = given.settings({"data_dir": os.path.abspath(given.settings({}).data_dir)})
    require_extra("cluster")
    if settings.grpc_address is not None:
        require_extra("grpc")
    lines = logs.set_up(settings.log_level, settings.log_format)
    file_descriptors.raise_file_limit()
    plan = plan_node(HostDisk(), settings, count)
    checked = [given.settings(each.changes) for each in plan.processes]  # raises before anything is started

    def command(process: ProcessPlan) -> list[str]:
        return [sys.executable, "-m", "mansio", *given.arguments(process.changes), "--supervised"]

    from mansio.node.processes.supervisor import Supervisor

    supervisor = Supervisor(plan, settings, checked[0], command)
    return asyncio.run(run_supervisor(supervisor, settings, lines))


async def run_supervisor(supervisor: Supervisor, settings: Settings, lines: LineHandler) -> int:
    import asyncio

    from mansio.node.processes.broker_process import run_until_first
    from mansio.node.processes.restarts import FORCED_EXIT_CODE

    manager = SystemdNotifier()
    for name in MANAGER_VARIABLES:
        os.environ.pop(name, None)
    stop = asyncio.Event()
    impatient = asyncio.Event()
    _handle_signals(supervisor, settings, stop, impatient)
    heartbeats = asyncio.create_task(send_heartbeats(manager, lines), name="pulse")
    is_over = False

    async def run() -> None:
        await supervisor.start()
        _print_ready(supervisor)
        manager.ready(f"{len(supervisor.brokers)} processes")
        await supervisor.watch(manager.watchdog_s)

    try:
        is_over = await run_until_first(run(), stop.wait())
    finally:
        manager.stopping()
        code = await supervisor.stop()
        heartbeats.cancel()
        lines.write_suppressed(at_end=True)
        manager.close()
    if impatient.is_set():
        return FORCED_EXIT_CODE
    return 1 if is_over else code


def _handle_signals(
    supervisor: Supervisor, settings: Settings, stop: asyncio.Event, impatient: asyncio.Event
) -> None:
    """Stop on SIGTERM and SIGINT, kill the brokers on the second one. SIGHUP lets brokers with certificates read them
    again; without certificates, or if the end of the terminal sends it, it stops, unless it is ignored (nohup)."""
    import asyncio

    def on_signal() -> None:
        if stop.is_set():
            impatient.set()
            supervisor.kill()
        stop.set()

    had_terminal = has_terminal()
    has_certificates = any(each.is_encrypted for each in settings.security_protocols)

    def on_hangup() -> None:
        if not has_certificates or (had_terminal and not has_terminal()):
            stop.set()
        else:
            supervisor.reload()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if has_certificates or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, on_hangup)


def _print_ready(supervisor: Supervisor) -> None:
    """Print the line with the addresses: those of the Kafka protocol separated by commas, the shared ones once."""
    known = [each.process.addresses for each in supervisor.brokers.values()]
    shared = {name: value for name, value in known[0].items() if name not in ("kafka", "data", "pid")}
    listeners = ",".join(each["kafka"] for each in known)
    others = " ".join(f"{name}={value}" for name, value in shared.items())
    monitoring = "off" if supervisor.monitoring_address is None else str(supervisor.monitoring_address)
    pids = ",".join(str(each.process.pid) for each in supervisor.brokers.values())
    print(
        f"mansio {__version__} ready kafka={listeners} {others} monitoring={monitoring} "
        f"data={supervisor.plan.directory} pid={os.getpid()} pids={pids}",
        flush=True,
    )
