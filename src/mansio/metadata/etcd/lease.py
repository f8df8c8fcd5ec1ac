"""Leases in etcd: for an event loop (`EtcdLeases`), and for a thread that must not wait for any loop
(`ThreadKeepAlive`).

The session of a broker depends on its lease, so the thread has its own connection, with gRPC's blocking interface: the
asyncio interface of several threads would wake each other (grpc issue 25364), and a blocked loop must not delay
renewals.

Invariants:
* A renewal that is answered reached etcd's leader after it was sent (a leader that has just lost the other members
  answers until it notices, for a second or two).
* A renewal that is not answered within `CALL_DEADLINE_S` is abandoned, and the next one is sent to the next endpoint.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import grpc

from mansio.metadata.etcd import rpc_pb2 as rpc
from mansio.metadata.etcd.call_outcome import EtcdWithoutUsers, Outcome, classify
from mansio.metadata.etcd.channel import CALL_DEADLINE_S, HAS_LEADER, OPTIONS, credentials
from mansio.metadata.etcd.config import target
from mansio.metadata.etcd.messages import AUTHENTICATE, GRANT, KEEP_ALIVE, REVOKE, Method
from mansio.metadata.metadata_store import LeaseExpired

if TYPE_CHECKING:
    from mansio.metadata.etcd.client import EtcdClient
    from mansio.metadata.etcd.config import EtcdConfig

TOKENS_MAX: Final = 2
"""Tokens that one renewal of the thread tries: the current one and a new one."""


class EtcdLeases:
    """`Leases` with a client, which the caller closes."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client

    async def grant(self, ttl_s: float) -> int:
        """Create a lease of at least `ttl_s` (etcd counts whole seconds) and return its id. A lease whose response is
        lost expires by itself."""
        answer = await self._client.call(GRANT, rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s)))
        return int(answer.ID)

    async def keep_alive_once(self, lease: int) -> float:
        return _left(lease, await self._client.call(KEEP_ALIVE, rpc.LeaseKeepAliveRequest(ID=lease)))

    async def revoke(self, lease: int) -> None:
        try:
            await self._client.call(REVOKE, rpc.LeaseRevokeRequest(ID=lease))
        except LeaseExpired:
            return


class ThreadKeepAlive:
    """Renews leases from a thread. The caller retries: each call blocks for at most about `CALL_DEADLINE_S`, and uses
    another endpoint after a failure."""

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self._current = 0
        self._channel: grpc.Channel | None = None
        self._token: str | None = None if config.user is not None else ""

    def keep_alive_once(self, lease: int) -> float:
        """Renew a lease. Returns the remaining seconds. Raises `LeaseExpired`, `Unavailable`, `EtcdDenied`."""
        for _ in range(TOKENS_MAX):
            try:
                if self._token is None:
                    self._token = self._authenticate()
                return _left(lease, self._call(KEEP_ALIVE, rpc.LeaseKeepAliveRequest(ID=lease)))
            except grpc.RpcError as failed:
                failure = classify(failed.code(), failed.details(), self._config.endpoints[self._current])
            if failure.outcome is Outcome.STALE_TOKEN and self._config.user is not None:
                self._token = None
                continue
            if failure.outcome is not Outcome.REFUSED:
                self._rotate()
            break
        raise failure.error

    def close(self) -> None:
        """Close the channel. Idempotent."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _authenticate(self) -> str:
        request = rpc.AuthenticateRequest(name=self._config.user, password=self._config.password)
        try:
            return str(self._call(AUTHENTICATE, request).token)
        except grpc.RpcError as failed:
            failure = classify(failed.code(), failed.details(), self._config.endpoints[self._current])
            if isinstance(failure.error, EtcdWithoutUsers):
                return ""
            raise

    def _call(self, method: Method[Any, Any], request: Any) -> Any:
        call = self._connected().unary_unary(
            method.path, request_serializer=method.write, response_deserializer=method.read
        )
        token = (("token", self._token),) if self._token else ()
        return call(request, timeout=CALL_DEADLINE_S, metadata=(HAS_LEADER, *token))

    def _connected(self) -> grpc.Channel:
        if self._channel is None:
            address = target(self._config.endpoints[self._current])
            certificates = self._config.certificates
            self._channel = (
                grpc.insecure_channel(address, options=OPTIONS)
                if certificates is None
                else grpc.secure_channel(address, credentials(certificates), options=OPTIONS)
            )
        return self._channel

    def _rotate(self) -> None:
        self.close()
        self._current = (self._current + 1) % len(self._config.endpoints)


def _left(lease: int, answer: rpc.LeaseKeepAliveResponse) -> float:
    if answer.TTL <= 0:
        raise LeaseExpired(f"lease {lease:x} has ended")
    return float(answer.TTL)
