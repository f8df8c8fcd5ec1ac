"""Supervisor of one etcd member: start, health check, restart, stop.

`start` returns when the member is healthy, which needs a majority of all members; one that ends before that is not
restarted, because its command line or its directory is wrong. From then on a member that ends is restarted after a
backoff that doubles up to `PAUSE_S_MAX`. `stop` ends it by its own process id. etcd's `/health` is true only when the
member takes part in a majority: it reads through consensus.

Invariant: one process at a time, and none after `stop` or a failed `start` has returned.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import ssl
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from mansio.config.cluster import url_host
from mansio.errors import ConfigError, Unavailable
from mansio.host.port_owner import in_use
from mansio.logs import fields
from mansio.node.etcd_member.child_process import STOP_S_MAX, ChildProcess, exit_reason
from mansio.node.etcd_member.command import arguments

if TYPE_CHECKING:
    from mansio.node.etcd_member.command import MemberPlan, TlsFiles
    from mansio.node.etcd_member.executable import EtcdProgram


logger = logging.getLogger(__name__)

ANSWER_S_MAX: Final = 3.0
ANSWER_BYTES_MAX: Final = 64 << 10
FIRST_PAUSE_S: Final = 0.5
PAUSE_S_MAX: Final = 30.0
STABLE_S: Final = 60.0
"""A member that ran for this long before it ended is restarted after the first backoff again."""

POLL_S: Final = 0.05
LOG_INTERVAL_S: Final = 5.0
"""Interval at which a start that waits is logged."""

TRIM_S: Final = 10.0
TAIL_LINES: Final = 5


class EtcdMember:
    """Belongs to the event loop on which it is started; `start` and `stop` are called once each."""

    def __init__(
        self, plan: MemberPlan, program: EtcdProgram, *, first_pause_s: float = FIRST_PAUSE_S
    ) -> None:
        self.plan = plan
        self.program = program
        self.restarts = 0
        """Number of restarts after it ended by itself."""
        self._first_pause_s = first_pause_s
        self._child = ChildProcess([program.path, *arguments(plan)], plan.log_path)
        self._tls = _context(plan)
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def client_url(self) -> str:
        return self.plan.client_url

    @property
    def pid(self) -> int:
        """Its process id, 0 before the first start."""
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.running

    async def start(self, wait_s: float) -> None:
        """Return when it is healthy. Raises `ConfigError` if it cannot run with this configuration, `Unavailable` after
        `wait_s`."""
        self._prepare_directory()
        logger.info(
            "etcd_member_starting",
            extra=fields(name=self.plan.own.name, url=self.client_url, version=self.program.version),
        )
        await self._child.start()
        try:
            await self._until_healthy(wait_s)
        except BaseException:
            await self._child.stop()
            raise
        logger.info("etcd_member_ready", extra=fields(name=self.plan.own.name, pid=self.pid))
        self._supervisor = asyncio.create_task(self._keep(), name="etcd member")

    async def stop(self, wait_s: float = STOP_S_MAX) -> None:
        """Stop it, after `wait_s` by SIGKILL, which loses nothing; its users have been stopped before."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._child.running:
            code = await self._child.stop(wait_s)
            logger.info(
                "etcd_member_stopped", extra=fields(name=self.plan.own.name, ended=exit_reason(code or 0))
            )

    async def unhealthy_reason(self, wait_s: float = ANSWER_S_MAX) -> str | None:
        """Why it is not healthy; None if it is. Healthy means that a majority works."""
        if not self._child.running:
            return "it does not run"
        return await unhealthy_reason_of(self._health_url, self._tls, wait_s=wait_s)

    def tail(self) -> list[str]:
        """The last lines of its output."""
        return self._child.tail()

    # -- start --------

    @property
    def _health_url(self) -> str:
        """URL of the health check. The member's certificate need not be valid for an address, so TLS uses the name that
        the others use."""
        if self._tls is not None:
            return self.client_url
        host = self.plan.listen_host
        return f"http://{url_host(host)}:{self.plan.own.client_port}"

    def _prepare_directory(self) -> None:
        os.makedirs(self.plan.directory, mode=0o700, exist_ok=True)
        os.makedirs(self.plan.data_directory, mode=0o700, exist_ok=True)  # required by etcd
        for port in (self.plan.own.peer_port, self.plan.own.client_port):
            _check_free(self.plan.listen_host, port)

    async def _until_healthy(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        logged_at = start
        while True:
            unhealthy_reason = await self.unhealthy_reason(
                min(ANSWER_S_MAX, max(start + wait_s - loop.time(), POLL_S))
            )
            if unhealthy_reason is None:
                return
            now = loop.time()
            if not self._child.running:
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
            await asyncio.sleep(POLL_S)

    def _unreachable_members(self) -> str:
        count = len(self.plan.members)
        if count == 1:
            return f" (its log: {self.plan.log_path})"
        return f"; {count // 2 + 1} of the {count} members have to run (its log: {self.plan.log_path})"

    def _last_error_line(self) -> str:
        """The last line of etcd's output with an error, without its prefix."""
        lines = self._child.tail()
        errors = [line for line in lines if '"error"' in line or '"fatal"' in line or "rror" in line]
        return (errors or lines or ["no output"])[-1]

    # -- supervision --------

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = self._first_pause_s
        while True:
            started_at = loop.time()
            code = await self._ended()
            if loop.time() - started_at >= STABLE_S:
                pause_s = self._first_pause_s
            logger.error(
                "etcd_member_exited",
                extra=fields(
                    name=self.plan.own.name,
                    ended=exit_reason(code),
                    again_in_s=pause_s,
                    log=self.plan.log_path,
                    last=" | ".join(self._child.tail(TAIL_LINES)),
                ),
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
            try:
                await self._child.start()
            except OSError as error:
                logger.error(
                    "etcd_member_start_failed", extra=fields(reason=error)
                )  # and again after the backoff
                continue
            self.restarts += 1

    async def _ended(self) -> int:
        """Wait until the process has ended, and trim its log meanwhile."""
        waiting = asyncio.ensure_future(self._child.wait())
        try:
            while not (await asyncio.wait([waiting], timeout=TRIM_S))[0]:
                self._child.trim_log()
            return waiting.result()
        finally:
            waiting.cancel()


def _context(plan: MemberPlan) -> ssl.SSLContext | None:
    if plan.tls is None:
        return None
    try:
        return tls_context(plan.tls)
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(
            f"etcd_cert_file: cannot use the certificates: {error.strerror or error}"
        ) from error


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = (
                in_use(host, port)
                if error.errno == errno.EADDRINUSE
                else f"cannot listen on {host}:{port}: {error.strerror}"
            )
            raise ConfigError(f"etcd_join: {reason}") from error


async def unhealthy_reason_of(
    url: str, tls: ssl.SSLContext | None = None, *, wait_s: float = ANSWER_S_MAX
) -> str | None:
    """Why the member at `url` is not healthy; None if it is."""
    target = urlsplit(url)
    try:
        async with asyncio.timeout(wait_s):
            reader, writer = await asyncio.open_connection(target.hostname, target.port, ssl=tls)
            try:
                writer.write(f"GET /health HTTP/1.0\r\nHost: {target.netloc}\r\n\r\n".encode())
                answer = await reader.read(ANSWER_BYTES_MAX)
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer in {wait_s:.3g} s"
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
    """TLS context with the member's own certificate. Raises `OSError` for files that are missing or not PEM."""
    context = ssl.create_default_context(cafile=tls.ca_file)
    context.load_cert_chain(tls.cert_file, tls.key_file)
    return context
