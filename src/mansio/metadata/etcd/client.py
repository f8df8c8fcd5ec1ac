"""Calls to an etcd cluster: choice of the endpoint, retries, authentication.

Invariants:
* All calls go to one endpoint as long as it responds; then they switch to the next one.
* A call that may have been executed is retried only if it is `repeatable`.
* A call is retried for at most `CALLS_DEADLINE_S`. In addition it may authenticate, which takes up to
  `AUTHENTICATE_DEADLINE_S`.
* Only one authentication runs at a time; concurrent calls share its token.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from mansio.errors import Unavailable
from mansio.logs import fields
from mansio.metadata.etcd import rpc_pb2 as rpc
from mansio.metadata.etcd.call_outcome import CallOutcome, EtcdUnsupported, EtcdWithoutUsers
from mansio.metadata.etcd.channel import (
    CALL_DEADLINE_S,
    REQUIRE_LEADER,
    CallFailed,
    Endpoint,
    SingleFlight,
    Stream,
)
from mansio.metadata.etcd.messages import AUTHENTICATE, STATUS
from mansio.metadata.metadata_store import AmbiguousOutcome, StoreCounts
from mansio.ports import Backoff
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from mansio.metadata.etcd.call_outcome import Failure
    from mansio.metadata.etcd.channel import Metadata
    from mansio.metadata.etcd.config import EtcdConfig
    from mansio.metadata.etcd.messages import Method
    from mansio.ports import Random

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

CALLS_DEADLINE_S: Final = 3.0
"""Deadline of all attempts of one call together. It is longer than etcd takes to elect a leader."""
TOKENS_PER_CALL_MAX: Final = 2
AUTHENTICATE_DEADLINE_S: Final = 5.0
"""etcd hashes the password with bcrypt, which takes more than a second on an overloaded machine."""

CALL_BACKOFF: Final = Backoff(15, 375, jitter=1 / 3)
"""Pauses between the attempts of one call: the first lasts 10 to 20 ms, the longest 250 to 500 ms."""

logger = logging.getLogger(__name__)


class EndpointStatus(NamedTuple):
    """Status of the etcd member at one endpoint. `reason` is the error if the endpoint did not respond, else ""."""

    endpoint: str
    version: str = ""
    is_leader: bool = False
    database_bytes: int = 0
    alarms: tuple[str, ...] = ()
    reason: str = ""


class OpenStream(NamedTuple, Generic[RequestT, ResponseT]):
    """An open stream, with its endpoint and the authentication token with which it was opened."""

    stream: Stream[RequestT, ResponseT]
    endpoint: Endpoint
    token: str | None


class StreamFailed(Exception):
    """Raised when a stream could not be opened at `endpoint` with the authentication token `token`."""

    def __init__(self, failure: Failure, endpoint: Endpoint, token: str | None) -> None:
        super().__init__(failure.error.message)
        self.failure = failure
        self.endpoint = endpoint
        self.token = token


class EtcdClient:
    """Client of an etcd cluster, used on one event loop. `open` creates it."""

    def __init__(self, config: EtcdConfig, random: Random) -> None:
        self._config = config
        self._random = random
        self._endpoints = [Endpoint(url, config.certificates) for url in config.endpoints]
        self._current = 0
        self._cluster_id: int | None = None
        self._token: str | None = None
        self._authenticating: SingleFlight[None] = SingleFlight()
        self._is_failing = False
        self._closed = False
        self._answered_count = self._ambiguous_count = 0
        self._failure_counts = {outcome.name.lower(): 0 for outcome in CallOutcome}

    @property
    def counts(self) -> StoreCounts:
        """Numbers of calls by outcome. A failed watch counts as a call; calls of `ThreadKeepAlive` do not count."""
        return StoreCounts(self._answered_count, self._ambiguous_count, dict(self._failure_counts))

    @classmethod
    async def open(cls, config: EtcdConfig, random: Random) -> EtcdClient:
        """Create a client and check every endpoint that responds.

        Raises `EtcdUnsupported`, `EtcdDenied`, and `Unavailable` if no endpoint responds.
        """
        client = cls(config, random)
        try:
            await client._check_all()
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def endpoint(self) -> str:
        """URL of the endpoint to which calls go now."""
        return self._endpoints[self._current].url

    async def close(self) -> None:
        """Close all connections; calls in progress fail. Idempotent."""
        self._closed = True
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    async def call(
        self, method: Method[RequestT, ResponseT], request: RequestT, *, repeatable: bool = True
    ) -> ResponseT:
        """Execute a call, with retries. Raises the error of the last attempt.

        If a call that is not `repeatable` may have been executed, it is not retried and raises `AmbiguousOutcome`.
        """
        attempts = Attempts(self._random)
        while True:
            endpoint, token = self._endpoints[self._current], self._token
            try:
                await self._prepare(endpoint)
            except CallFailed as failed:
                await self.handle_failure(endpoint, failed.failure, token, attempts)
                continue
            token = self._token
            try:
                answer = await endpoint.call(method, request, self._metadata(), CALL_DEADLINE_S)
            except CallFailed as failed:
                if failed.failure.outcome is CallOutcome.UNKNOWN and not repeatable:
                    self._failure_counts["unknown"] += 1
                    self._ambiguous_count += 1
                    self._switch_endpoint(endpoint, failed.failure)
                    raise AmbiguousOutcome(
                        f"{failed.failure.error.message}: it may have been executed"
                    ) from failed
                await self.handle_failure(endpoint, failed.failure, token, attempts)
                continue
            self._answered_count += 1
            self.record_success(endpoint)
            return answer

    async def stream(self, method: Method[RequestT, ResponseT]) -> OpenStream[RequestT, ResponseT]:
        """Open a stream to the current endpoint, without retries.

        Raises `StreamFailed`; the caller calls `handle_failure` with its attributes, then retries.
        """
        endpoint, token = self._endpoints[self._current], self._token
        try:
            await self._prepare(endpoint)
            token = self._token
            return OpenStream(await endpoint.stream(method, self._metadata()), endpoint, token)
        except CallFailed as failed:
            raise StreamFailed(failed.failure, endpoint, token) from failed

    async def handle_failure(
        self, endpoint: Endpoint, failure: Failure, token: str | None, attempts: Attempts
    ) -> None:
        """Prepare another attempt after a failed one, or raise the error of the failure.

        `endpoint` and `token` are those of the failed attempt. Waits before the next attempt.
        """
        self._failure_counts[failure.outcome.name.lower()] += 1
        if failure.outcome is CallOutcome.REFUSED:
            raise copied(failure.error)
        if failure.outcome is CallOutcome.STALE_TOKEN:
            if self._config.user is None or not attempts.may_request_token():
                raise copied(failure.error)
            if self._token == token:
                self._token = None
            return
        if failure.try_other_endpoint:
            self._switch_endpoint(endpoint, failure)
        if not await attempts.pause():
            raise copied(failure.error)

    def record_success(self, endpoint: Endpoint) -> None:
        """Record that `endpoint` responded."""
        if self._is_failing:
            self._is_failing = False
            logger.info("etcd_available", extra=fields(endpoint=endpoint.url))

    async def endpoint_statuses(self) -> list[EndpointStatus]:
        """Return the status of each configured endpoint, also of those that do not respond."""
        return await asyncio.gather(*(self._endpoint_status(endpoint) for endpoint in self._endpoints))

    async def _endpoint_status(self, endpoint: Endpoint) -> EndpointStatus:
        try:
            status = await endpoint.call(STATUS, rpc.StatusRequest(), self._metadata(), CALL_DEADLINE_S)
        except CallFailed as failed:
            return EndpointStatus(endpoint.url, reason=failed.failure.error.message)
        is_leader = status.leader == status.header.member_id
        return EndpointStatus(endpoint.url, status.version, is_leader, status.db_size, tuple(status.errors))

    async def _check_all(self) -> None:
        reasons = []
        for number in reversed(range(len(self._endpoints))):
            try:
                await self._prepare(self._endpoints[number])
            except CallFailed as failed:
                is_denied = failed.failure.outcome is CallOutcome.STALE_TOKEN and self._config.user is None
                is_refused = failed.failure.outcome is CallOutcome.REFUSED
                if is_denied or is_refused or isinstance(failed.failure.error, EtcdUnsupported):
                    raise copied(failed.failure.error) from failed
                reasons.append(failed.failure.error.message)
            else:
                self._current = number
        if len(reasons) == len(self._endpoints):
            raise Unavailable(f"{'; '.join(reversed(reasons))}; a broker requires a running etcd")

    async def _prepare(self, endpoint: Endpoint) -> None:
        """Get an authentication token and check the endpoint, unless both were done before. Raises `CallFailed`."""
        if self._closed:
            raise Unavailable("the connection to etcd is closed")
        if self._config.user is not None and self._token is None:
            await self._authenticating.run(lambda: self._authenticate(endpoint))
        if not endpoint.checked:
            self._cluster_id = await endpoint.check(self._metadata(), self._cluster_id)

    async def _authenticate(self, endpoint: Endpoint) -> None:
        request = rpc.AuthenticateRequest(name=self._config.user, password=self._config.password)
        try:
            answer = await endpoint.call(AUTHENTICATE, request, (REQUIRE_LEADER,), AUTHENTICATE_DEADLINE_S)
            self._token = answer.token
        except CallFailed as failed:
            if not isinstance(failed.failure.error, EtcdWithoutUsers):
                raise
            self._token = ""  # when users are added, calls fail with a missing token

    def _metadata(self) -> Metadata:
        return (REQUIRE_LEADER, ("token", self._token)) if self._token else (REQUIRE_LEADER,)

    def _switch_endpoint(self, endpoint: Endpoint, failure: Failure) -> None:
        endpoint.require_check()
        if self._endpoints[self._current] is endpoint:
            self._current = (self._current + 1) % len(self._endpoints)
        if not self._is_failing:
            self._is_failing = True
            logger.warning(
                "etcd_unavailable", extra=fields(endpoint=endpoint.url, reason=failure.error.message)
            )


class Attempts:
    """Limits of the attempts of one call, and the pauses between them, which grow and are randomized."""

    def __init__(self, random: Random, deadline_s: float | None = CALLS_DEADLINE_S) -> None:
        """`deadline_s` is the maximum time of all attempts together in seconds; None: no limit."""
        self._backoff = replace(CALL_BACKOFF, uniform=random.uniform)
        self._now = asyncio.get_running_loop().time
        self._end = None if deadline_s is None else self._now() + deadline_s
        self._failures = self._tokens = 0

    def may_request_token(self) -> bool:
        self._tokens += 1
        return self._tokens <= TOKENS_PER_CALL_MAX

    async def pause(self) -> bool:
        """Wait before the next attempt. Returns False if there is no time for another one."""
        pause_s = self._backoff.delay_seconds(self._failures + 1)
        if self._end is not None and self._now() + pause_s >= self._end:
            return False
        self._failures += 1
        await asyncio.sleep(pause_s)
        return True

    def reset(self) -> None:
        """Restart the backoff after a success."""
        self._failures = self._tokens = 0
