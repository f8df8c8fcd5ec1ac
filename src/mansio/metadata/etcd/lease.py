"""Leases in etcd: `EtcdLeases` for the event loop, `ThreadKeepAlive` for a thread that renews a lease.

The session of a broker depends on its lease, so a blocked event loop must not delay renewals. The thread therefore has
its own connection and uses gRPC's blocking interface; gRPC's asyncio interface does not support several threads well
(grpc issue 25364).

Invariants:
* If a renewal gets a response, etcd's leader received it after it was sent. (A leader that has just lost the connection
  to the other members still responds for a second or two.)
* A renewal without a response within `CALL_DEADLINE_S` is abandoned, and the next one is sent to the next endpoint.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import grpc

from mansio.metadata.etcd import rpc_pb2 as rpc
from mansio.metadata.etcd.call_outcome import CallOutcome, EtcdWithoutUsers, classify
from mansio.metadata.etcd.channel import CALL_DEADLINE_S, CHANNEL_OPTIONS, REQUIRE_LEADER, channel_credentials
from mansio.metadata.etcd.config import host_and_port
from mansio.metadata.etcd.messages import AUTHENTICATE, GRANT, KEEP_ALIVE, REVOKE, Method
from mansio.metadata.metadata_store import LeaseExpired
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from mansio.metadata.etcd.client import EtcdClient
    from mansio.metadata.etcd.config import EtcdConfig

TOKENS_MAX: Final = 2
"""Maximum number of authentication tokens that one renewal of the thread tries: the current one and a new one."""


class EtcdLeases:
    """`Leases` on etcd. The caller closes the client."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client

    async def grant(self, ttl_s: float) -> int:
        """Create a lease of `ttl_s` seconds, rounded up to whole seconds; returns its id.

        If the response is lost, a lease may exist that nobody renews; it expires.
        """
        answer = await self._client.call(GRANT, rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s)))
        return int(answer.ID)

    async def keep_alive_once(self, lease: int) -> float:
        return _remaining_s(lease, await self._client.call(KEEP_ALIVE, rpc.LeaseKeepAliveRequest(ID=lease)))

    async def revoke(self, lease: int) -> None:
        try:
            await self._client.call(REVOKE, rpc.LeaseRevokeRequest(ID=lease))
        except LeaseExpired:
            return


class ThreadKeepAlive:
    """Renews leases from a thread. Each call blocks for at most about `CALL_DEADLINE_S`; the caller retries.

    After a failure the next call uses another endpoint.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self._current = 0
        self._channel: grpc.Channel | None = None
        self._token: str | None = None if config.user is not None else ""

    def keep_alive_once(self, lease: int) -> float:
        """Renew a lease. Returns its remaining time in seconds. Raises `LeaseExpired`, `Unavailable`, `EtcdDenied`."""
        for _ in range(TOKENS_MAX):
            try:
                if self._token is None:
                    self._token = self._authenticate()
                return _remaining_s(lease, self._call(KEEP_ALIVE, rpc.LeaseKeepAliveRequest(ID=lease)))
            except grpc.RpcError as failed:
                failure = classify(failed.code(), failed.details(), self._config.endpoints[self._current])
            if failure.outcome is CallOutcome.STALE_TOKEN and self._config.user is not None:
                self._token = None
                continue
            if failure.outcome is not CallOutcome.REFUSED:
                self._use_next_endpoint()
            break
        raise copied(failure.error)

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
        call = self._open_channel().unary_unary(
            method.path, request_serializer=method.write, response_deserializer=method.read
        )
        token = (("token", self._token),) if self._token else ()
        return call(request, timeout=CALL_DEADLINE_S, metadata=(REQUIRE_LEADER, *token))

    def _open_channel(self) -> grpc.Channel:
        if self._channel is None:
            address = host_and_port(self._config.endpoints[self._current])
            certificates = self._config.certificates
            self._channel = (
                grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
                if certificates is None
                else grpc.secure_channel(address, channel_credentials(certificates), options=CHANNEL_OPTIONS)
            )
        return self._channel

    def _use_next_endpoint(self) -> None:
        self.close()
        self._current = (self._current + 1) % len(self._config.endpoints)


def _remaining_s(lease: int, answer: rpc.LeaseKeepAliveResponse) -> float:
    if answer.TTL <= 0:
        raise LeaseExpired(f"lease {lease:x} has ended")
    return float(answer.TTL)
