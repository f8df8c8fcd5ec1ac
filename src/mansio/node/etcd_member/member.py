"""Supervisor of one etcd member: start, health check, restart, stop.

`start` returns when the member is healthy. etcd reports that at `/health` only if a majority of the members works,
because the health check is a linearizable read. A member that ends before it was healthy is not restarted, because its
command line or its directory is wrong. A member that ends later is restarted after a pause, which doubles up to
`RESTART_PAUSE_S_MAX`.

Invariant: at most one process runs at a time, and none after `stop` or a failed `start` has returned.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import ssl
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from mansio.config.cluster import url_host
from mansio.errors import ConfigError, Unavailable
from mansio.host.child_process import STOP_S_MAX, ChildProcess, exit_reason
from mansio.host.port_owner import port_in_use_message
from mansio.host.private_file import make_private_directory
from mansio.logs import fields
from mansio.node.etcd_member.command import arguments
from mansio.ports import Backoff

if TYPE_CHECKING:
    from mansio.node.etcd_member.command import MemberPlan, TlsFiles
    from mansio.node.etcd_member.executable import EtcdProgram


logger = logging.getLogger(__name__)

HEALTH_CHECK_S_MAX: Final = 3.0
HEALTH_RESPONSE_BYTES_MAX: Final = 64 << 10
RESTART_PAUSE_S_MIN: Final = 0.5
RESTART_PAUSE_S_MAX: Final = 30.0
STABLE_RUN_S_MIN: Final = 60.0
"""A member that ran for at least this long before it ended is restarted after `RESTART_PAUSE_S_MIN` again."""

HEALTH_POLL_INTERVAL_S: Final = 0.05
LOG_INTERVAL_S: Final = 5.0
"""Interval of the log lines while a start waits for a healthy member."""

LOG_TRIM_INTERVAL_S: Final = 10.0
TAIL_LINES: Final = 5


class EtcdMember:
    """Supervisor of one etcd member. `start` and `stop` are called once each, on the same event loop."""

    def __init__(
        self, plan: MemberPlan, program: EtcdProgram, *, first_pause_s: float = RESTART_PAUSE_S_MIN
    ) -> None:
        self.plan = plan
        self.program = program
        self.restarts = 0
        """Number of restarts after the process ended by itself."""
        self._restart_backoff = Backoff(first_pause_s * 1000, RESTART_PAUSE_S_MAX * 1000, jitter=0)
        self._child = ChildProcess([program.path, *arguments(plan)], plan.log_path)
        self._tls = _member_tls_context(plan)
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def client_url(self) -> str:
        return self.plan.client_url

    @property
    def pid(self) -> int:
        """The process id of the member; 0 before the first start."""
        return self._child.pid

    @property
    def is_running(self) -> bool:
        return self._child.is_running

    async def start(self, wait_s: float) -> None:
        """Start the member; returns when it is healthy.

        Raises `ConfigError` if it cannot run with its configuration, `Unavailable` if it is not healthy after `wait_s`.
        """
        self._prepare_directory()
        logger.info(
            "etcd_member_starting",
            extra=fields(name=self.plan.own_address.name, url=self.client_url, version=self.program.version),
        )
        await self._child.start()
        try:
            await self._wait_until_healthy(wait_s)
        except BaseException:
            await self._child.stop()
            raise
        logger.info("etcd_member_ready", extra=fields(name=self.plan.own_address.name, pid=self.pid))
        self._supervisor = asyncio.create_task(self._supervise(), name="etcd member")

    async def stop(self, wait_s: float = STOP_S_MAX) -> None:
        """Stop the member; after `wait_s` seconds by SIGKILL, which loses no data. The caller stops clients before."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._child.is_running:
            code = await self._child.stop(wait_s)
            logger.info(
                "etcd_member_stopped",
                extra=fields(name=self.plan.own_address.name, ended=exit_reason(code or 0)),
            )

    async def unhealthy_reason(self, wait_s: float = HEALTH_CHECK_S_MAX) -> str | None:
        """Why the member is not healthy; None if it is healthy, which requires a majority of the members."""
        if not self._child.is_running:
            return "it is not running"
        return await unhealthy_reason_of(self._health_url, self._tls, wait_s=wait_s)

    def tail(self) -> list[str]:
        """Return the last lines of the member's output."""
        return self._child.tail()

    # -- start --------

    @property
    def _health_url(self) -> str:
        """URL of the health check. With TLS it contains the host name, because the certificate need not be valid for
        the IP address."""
        if self._tls is not None:
            return self.client_url
        host = self.plan.listen_host
        return f"http://{url_host(host)}:{self.plan.own_address.client_port}"

    def _prepare_directory(self) -> None:
        try:
            make_private_directory(self.plan.directory)  # the data has what passwords can be guessed with
            make_private_directory(self.plan.data_directory)
        except OSError as error:
            raise ConfigError(
                f"cannot use {error.filename or self.plan.directory}: {error.strerror}"
            ) from error
        for port in (self.plan.own_address.peer_port, self.plan.own_address.client_port):
            _check_port_free(self.plan.listen_host, port)

    async def _wait_until_healthy(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        logged_at = start
        while True:
            unhealthy_reason = await self.unhealthy_reason(
                min(HEALTH_CHECK_S_MAX, max(start + wait_s - loop.time(), HEALTH_POLL_INTERVAL_S))
            )
            if unhealthy_reason is None:
                return
            now = loop.time()
            if not self._child.is_running:
                raise ConfigError(
                    f"the etcd member exited at once: {self._last_error_line()} (all of it: {self.plan.log_path})"
                )
            if now - start >= wait_s:
                raise Unavailable(
                    f"the etcd member is not healthy after {wait_s:g} s: "
                    f"{unhealthy_reason}{self._unreachable_members()}"
                )
            if now - logged_at >= LOG_INTERVAL_S:
                logged_at = now
                logger.info(
                    "etcd_member_waiting",
                    extra=fields(for_s=round(now - start), unhealthy_reason=unhealthy_reason),
                )
            await asyncio.sleep(HEALTH_POLL_INTERVAL_S)

    def _unreachable_members(self) -> str:
        count = len(self.plan.members)
        if count == 1:
            return f" (its log: {self.plan.log_path})"
        return f"; {count // 2 + 1} of the {count} members have to run (its log: {self.plan.log_path})"

    def _last_error_line(self) -> str:
        """Return the last line of etcd's output that contains an error; otherwise the last line."""
        lines = self._child.tail()
        errors = [line for line in lines if '"error"' in line or '"fatal"' in line or "rror" in line]
        return (errors or lines or ["no output"])[-1]

    # -- supervision --------

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        exits = 0
        while True:
            started_at = loop.time()
            code = await self._wait_for_exit()
            if loop.time() - started_at >= STABLE_RUN_S_MIN:
                exits = 0
            exits += 1
            pause_s = self._restart_backoff.delay_seconds(exits)
            logger.error(
                "etcd_member_exited",
                extra=fields(
                    name=self.plan.own_address.name,
                    ended=exit_reason(code),
                    again_in_s=pause_s,
                    log=self.plan.log_path,
                    last=" | ".join(self._child.tail(TAIL_LINES)),
                ),
            )
            await asyncio.sleep(pause_s)
            try:
                await self._child.start()
            except OSError as error:
                logger.error(
                    "etcd_member_start_failed", extra=fields(reason=error)
                )  # retried after the next pause
                continue
            self.restarts += 1

    async def _wait_for_exit(self) -> int:
        """Wait until the process has ended; returns its exit code. Trims its log meanwhile."""
        waiting = asyncio.ensure_future(self._child.wait())
        try:
            while not (await asyncio.wait([waiting], timeout=LOG_TRIM_INTERVAL_S))[0]:
                self._child.trim_log()
            return waiting.result()
        finally:
            waiting.cancel()


def _member_tls_context(plan: MemberPlan) -> ssl.SSLContext | None:
    if plan.tls is None:
        return None
    try:
        return tls_context(plan.tls)
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(
            f"etcd_cert_file: cannot use the certificates: {error.strerror or error}"
        ) from error


def _check_port_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = (
                port_in_use_message(host, port)
                if error.errno == errno.EADDRINUSE
                else f"cannot listen on {host}:{port}: {error.strerror}"
            )
            raise ConfigError(f"etcd_join: {reason}") from error


async def unhealthy_reason_of(
    url: str, tls: ssl.SSLContext | None = None, *, wait_s: float = HEALTH_CHECK_S_MAX
) -> str | None:
    """Why the etcd member at `url` is not healthy; None if it is healthy."""
    target = urlsplit(url)
    try:
        async with asyncio.timeout(wait_s):
            reader, writer = await asyncio.open_connection(target.hostname, target.port, ssl=tls)
            try:
                writer.write(f"GET /health HTTP/1.0\r\nHost: {target.netloc}\r\n\r\n".encode())
                answer = await reader.read(HEALTH_RESPONSE_BYTES_MAX)
            finally:
                writer.close()
    except TimeoutError:
        return f"no response within {wait_s:.3g} s"
    except ssl.SSLError as error:
        return f"TLS: {error.reason or error}"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return _parse_health(answer)


def _parse_health(answer: bytes) -> str | None:
    _, _, body = answer.partition(b"\r\n\r\n")
    try:
        health = json.loads(body)
    except ValueError:
        return "the server there is not etcd"
    if not isinstance(health, dict):
        return "the server there is not etcd"
    if str(health.get("health")).lower() == "true":
        return None
    return str(health.get("reason") or "no majority of the members responds")


def tls_context(tls: TlsFiles) -> ssl.SSLContext:
    """TLS context with the member's own certificate. Raises `OSError` if a file is missing or not PEM."""
    context = ssl.create_default_context(cafile=tls.ca_file)
    context.load_cert_chain(tls.cert_file, tls.key_file)
    return context
