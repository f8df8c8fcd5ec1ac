"""A broker with TLS under a million connections: neither its memory nor its descriptors grow.

`MANSIO_NIGHTLY_TLS_CONNECTIONS` sets another number. Of twenty connections, seventeen complete their handshake and send
a request; one sends nothing, one begins a handshake and leaves, and one does not use TLS.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import psutil

from nightly.soak.trend import after_warm_up, slope
from support.certificates import Authority
from support.machine import scaled
from support.nightly_counts import leave
from support.paths import free_port
from support.process import served
from support.tls_listener import client_context
from support.waiting import wait_until

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

CONNECTIONS = int(os.environ.get("MANSIO_NIGHTLY_TLS_CONNECTIONS", "1000000"))
SAMPLES = 200
THREADS = 2
ADDRESSES = 64
"""Addresses of clients, so that ports which the system keeps after a close do not run out."""

MEMORY_BYTES_MAX = 4 << 20
"""What the trend may add up to, for other sizes of things; 10 bytes for each connection would be more."""

API_VERSIONS = bytes.fromhex("00000011001200000000000100076c696272646b61")


class Sample(NamedTuple):
    """One look at the broker."""

    connections: int
    memory_bytes: int
    descriptors: int


class Clients:
    """Threads that connect, one connection after the other."""

    def __init__(self, port: int, context: ssl.SSLContext, total: int) -> None:
        self._port = port
        self._context = context
        self._total = total
        self._lock = threading.Lock()
        self.begun = 0
        self.served = 0
        self.errors: list[BaseException] = []
        self.threads = [threading.Thread(target=self._run, daemon=True) for _ in range(THREADS)]

    def _next(self) -> int | None:
        with self._lock:
            if self.begun == self._total:
                return None
            self.begun += 1
            return self.begun

    def _run(self) -> None:
        try:
            while (number := self._next()) is not None:
                self._connect(number)
        except (OSError, AssertionError) as error:
            self.errors.append(error)

    def _connect(self, number: int) -> None:
        source = f"127.0.1.{1 + number % ADDRESSES}"
        address = ("127.0.0.1", self._port)
        with socket.create_connection(address, timeout=scaled(30), source_address=(source, 0)) as plain:
            kind = number % 20
            if kind == 0:
                return
            if kind == 1:
                plain.sendall(b"\x16\x03\x01\x02\x00")
                return
            if kind == 2:
                plain.sendall(API_VERSIONS)
                with contextlib.suppress(ConnectionError):
                    plain.recv(100)
                return
            with self._context.wrap_socket(plain, server_hostname="localhost") as client:
                client.sendall(API_VERSIONS)
                assert client.recv(4)
            with self._lock:
                self.served += 1


def test_memory_does_not_grow_over_a_million_tls_connections(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    issued = authority.issue()
    port = free_port()
    arguments = [
        "--kafka", f"SSL://127.0.0.1:{port}",
        "--set", f"ssl_certificate_location={issued.certificate}",
        "--set", f"ssl_key_location={issued.key}",
    ]  # fmt: skip
    with served(tmp_path / "data", arguments=arguments) as broker:
        process = psutil.Process(broker.pid)
        clients = Clients(port, client_context(authority.certificate), CONNECTIONS)
        descriptors = process.num_fds()
        began = time.monotonic()
        for thread in clients.threads:
            thread.start()
        samples: list[Sample] = []
        while any(thread.is_alive() for thread in clients.threads):
            if clients.begun >= len(samples) * CONNECTIONS // SAMPLES:
                samples.append(Sample(clients.begun, process.memory_info().rss, process.num_fds()))
            time.sleep(0.05)
        assert not clients.errors, clients.errors
        elapsed_s = time.monotonic() - began
        wait_until(lambda: process.num_fds() <= descriptors + 10, 30, "the descriptors of closed connections")
        assert clients.served == sum(number % 20 > 2 for number in range(1, CONNECTIONS + 1))
        late = after_warm_up(samples)
        per_connection = slope(
            [each.connections for each in late], [float(each.memory_bytes) for each in late]
        )
        leave(
            "TLS connections",
            connections=CONNECTIONS,
            seconds=elapsed_s,
            first_mib=samples[0].memory_bytes / 2**20,
            third_mib=late[0].memory_bytes / 2**20,
            last_mib=late[-1].memory_bytes / 2**20,
            bytes_per_connection=per_connection,
        )
        grown = per_connection * (late[-1].connections - late[0].connections)
        assert grown < MEMORY_BYTES_MAX, late[:: max(len(late) // 10, 1)]
        assert broker.stop() == 0
