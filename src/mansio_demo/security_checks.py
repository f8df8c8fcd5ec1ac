"""Attempts to get into a protected cluster: clients without TLS, without a user and with a wrong password, a user
without rights, and clients of etcd without a certificate.

Each check counts who was refused. One who was let in is a failure.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from mansio.client import connect
from mansio.errors import AuthenticationFailed, AuthorizationFailed
from mansio_demo.cluster_process import BROKERS
from mansio_demo.proofs import Proof
from mansio_demo.server_process import USER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from mansio.client import Client
    from mansio_demo.cluster_process import ClusterProcess

WITHOUT_RIGHTS: Final = "guest"
TIMEOUT_S: Final = 10.0
IN_SYNC_S_MAX: Final = 30.0
POLL_INTERVAL_S: Final = 0.05


async def prove_security(process: ClusterProcess, client: Client, topic: str) -> list[Proof]:
    """Try to get into a cluster that runs, and look at the replicas of `topic`; return what that proves."""
    addresses = process.kafka.split(",")
    ca = str(process.security_directory / "ca.pem")
    without_tls: Sequence[dict[str, Any]] = ({"tls": False, "user": ""},)
    wrong_users: Sequence[dict[str, Any]] = (
        {"tls": ca, "user": ""},
        {"tls": ca, "user": USER, "password": "wrong"},
        {"tls": ca, "user": "nobody", "password": "wrong"},
    )
    in_sync, partitions = await _in_sync(client, topic)
    return [
        await _row("TLS at every broker", "clients without TLS", _refused(addresses, without_tls)),
        await _row("only users get in", "no user, wrong passwords", _refused(addresses, wrong_users)),
        await _row("rights decide", "a user without ACLs", _refused_without_rights(addresses, ca, client)),
        await _row("etcd asks for certificates", "clients without one", _refused_by_etcd(process.etcd, ca)),
        Proof(
            "replication over TLS",
            "no listener without TLS",
            f"{in_sync} of {partitions} in sync",
            in_sync == partitions,
        ),
    ]


async def _row(claim: str, test: str, refused: Awaitable[tuple[int, int]]) -> Proof:
    count, attempts = await refused
    return Proof(claim, test, f"{count} of {attempts} refused", count == attempts)


async def _refused(addresses: Sequence[str], clients: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Connect to each broker as each of the clients; return how many were refused, and how many there were."""
    refused = 0
    for address in addresses:
        for security in clients:
            try:
                async with connect(address, **security) as client:
                    await client.admin.describe_cluster()
            except AuthenticationFailed:
                refused += 1
    return refused, len(addresses) * len(clients)


async def _refused_without_rights(addresses: Sequence[str], ca: str, admin: Client) -> tuple[int, int]:
    """Create a user, who has no rights, and let it administer at each broker; return how many attempts were refused,
    and how many there were."""
    password = secrets.token_urlsafe(18)
    await admin.admin.users.create(WITHOUT_RIGHTS, password)
    refused = attempts = 0
    for address in addresses:
        async with connect(address, tls=ca, user=WITHOUT_RIGHTS, password=password) as client:
            for attempt in (
                client.admin.users.list(),
                client.admin.acls.list(),
                client.admin.quotas.set(user=WITHOUT_RIGHTS, values={"producer_byte_rate": 1.0}),
            ):
                attempts += 1
                try:
                    await attempt
                except AuthorizationFailed:
                    refused += 1
    await admin.admin.users.delete(WITHOUT_RIGHTS)
    return refused, attempts


async def _refused_by_etcd(url: str, ca: str) -> tuple[int, int]:
    """Ask etcd without TLS, and with TLS but no certificate; return how many were refused, and how many there were."""
    ways = (None, ssl.create_default_context(cafile=ca))
    answers = [await asyncio.to_thread(_answer_of_etcd, url, way) for way in ways]
    return sum(not each for each in answers), len(ways)


def _answer_of_etcd(url: str, tls: ssl.SSLContext | None) -> bool:
    """Whether etcd answers a request for its version."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 0
    try:
        with socket.create_connection((host, port), TIMEOUT_S) as plain:
            connection = plain if tls is None else tls.wrap_socket(plain, server_hostname=host)
            with connection:
                connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
                return connection.recv(12) == b"HTTP/1.0 200"
    except (ssl.SSLError, ConnectionError):
        return False


async def _in_sync(client: Client, topic: str) -> tuple[int, int]:
    """Wait until all replicas are in sync; return the number of partitions that are, and the number of partitions."""
    found: list[bool] = []
    try:
        async with asyncio.timeout(IN_SYNC_S_MAX):
            while not found or not all(found):
                await asyncio.sleep(POLL_INTERVAL_S)
                partitions = (await client.admin.describe_topic(topic)).partitions
                found = [len(each.in_sync_replicas) == BROKERS for each in partitions]
    except TimeoutError:
        pass
    return sum(found), len(found)
