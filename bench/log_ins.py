"""Processor time of the broker for a log-in, beside that for a connection without one.

    python -m bench.log_ins [--rounds N] [--count N] [--salting]

One broker has an open listener and one with SASL_PLAINTEXT, both on loopback. In each round a client opens `count`
connections of each kind in turn, one after the other, and sends the requests of Kafka's clients: ApiVersions,
SaslHandshake and two of SaslAuthenticate. The client has salted its password before; with `--salting` it does so for
each log-in. The broker does not take part in that, but its caches get cold meanwhile. Printed are medians of the rounds
with minimum and maximum; "alone" is without the connection and ApiVersions of the same round.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import mansio.blocking
from bench.servers import Server, free_port
from mansio.state.authentication.credentials import ScramMechanism, salt_password
from mansio.state.authentication.scram import NONCE_BYTES
from mansio.state.authentication.scram_client import ScramClient
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

USER: Final = "alice"
PASSWORD: Final = "correct horse"  # of this run only
CONNECTION: Final = "connection"
KINDS: Final = (CONNECTION, *(each.value for each in ScramMechanism))
WARM_UP: Final = 50


class Client:
    """One connection that sends one request at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def call(self, key: ApiKey, version: int, fields: dict[str, Any]) -> Any:
        self._socket.sendall(messages.encode_request(key, version, 1, "bench", fields))
        frame = self._file.read(int.from_bytes(self._file.read(4)))
        return messages.decode_response_frame(key, version, frame)[1]

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class LogIns:
    """Connects as a user. Salts the password once for each mechanism."""

    def __init__(self, port: int, *, is_salting: bool) -> None:
        self._port = port
        self._is_salting = is_salting
        self._salted: dict[tuple[ScramMechanism, bytes], bytes] = {}

    def run(self, kind: str) -> None:
        """Open a connection of this kind and close it."""
        client = Client(self._port)
        client.call(ApiKey.API_VERSIONS, 3, {"client_software_name": "bench", "client_software_version": "1"})
        if kind != CONNECTION:
            self._log_in(client, ScramMechanism(kind))
        client.close()

    def _log_in(self, client: Client, mechanism: ScramMechanism) -> None:
        shaken = client.call(ApiKey.SASL_HANDSHAKE, 1, {"mechanism": mechanism.value})
        assert shaken.error_code == 0
        scram = ScramClient(mechanism, USER, os.urandom(NONCE_BYTES))
        challenge = client.call(ApiKey.SASL_AUTHENTICATE, 2, {"auth_bytes": scram.first()})
        salting = scram.read_challenge(bytes(challenge.auth_bytes))
        key = mechanism, salting.salt
        if self._is_salting or key not in self._salted:
            self._salted[key] = salt_password(mechanism, PASSWORD.encode(), salting.salt, salting.iterations)
        answer = client.call(ApiKey.SASL_AUTHENTICATE, 2, {"auth_bytes": scram.final(self._salted[key])})
        scram.verify(bytes(answer.auth_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=500, help="connections of each kind in a round")
    parser.add_argument(
        "--salting", action="store_true", help="the client salts its password for each log-in"
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        open_port, port = free_port(), free_port()
        listeners = f"PLAINTEXT://127.0.0.1:{open_port},SASL_PLAINTEXT://127.0.0.1:{port}"
        serve = ["serve", "--data", f"{directory}/data", "--kafka", listeners, "--http", ""]
        command = [sys.executable, "-m", "mansio.cli.main", *serve, "--set", "open_listeners=PLAINTEXT"]
        server = Server(command, port, Path(directory) / "data", None, b"ready")
        try:
            measure(server, open_port, chosen)
        finally:
            server.end()


def measure(server: Server, open_port: int, chosen: argparse.Namespace) -> None:
    with mansio.blocking.connect(f"127.0.0.1:{open_port}", tls=False) as admin:
        admin.admin.users.create(USER, PASSWORD)
    log_ins = LogIns(server.port, is_salting=chosen.salting)
    for kind in KINDS * WARM_UP:
        log_ins.run(kind)
    server.wait_idle()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(chosen.rounds):
        turn = number % len(KINDS)
        for kind in KINDS[turn:] + KINDS[:turn]:
            before = server.cpu_precise_s()
            for _ in range(chosen.count):
                log_ins.run(kind)
            found[kind].append((server.cpu_precise_s() - before) / chosen.count * 1000)
    for kind in KINDS:
        print(f"{kind}: {spread(found[kind])} ms")
        if kind != CONNECTION:
            alone = [whole - base for whole, base in zip(found[kind], found[CONNECTION], strict=True)]
            print(f"{kind}, alone: {spread(alone)} ms")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


if __name__ == "__main__":
    main()
