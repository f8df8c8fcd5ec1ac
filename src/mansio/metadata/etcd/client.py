"""Calls to an etcd cluster: choice of the endpoint, retries, authentication.

Invariants:
* Calls go to one endpoint as long as it responds; then all calls switch to the next one.
* A call that may have been executed is repeated only if it is `repeatable`.
* A call is tried for at most `CALLS_DEADLINE_S`, and once more after an authentication, which may take
  `AUTHENTICATE_DEADLINE_S`.
* Two calls never request a token at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from mansio.errors import Unavailable
from mansio.logs import fields
from mansio.metadata.etcd import rpc_pb2 as rpc
from mansio.metadata.etcd.call_outcome import EtcdUnsupported, EtcdWithoutUsers, Outcome
from mansio.metadata.etcd.channel import (
    CALL_DEADLINE_S,
    HAS_LEADER,
    CallFailed,
    Endpoint,
    SingleFlight,
    Stream,
)
from mansio.metadata.etcd.messages import AUTHENTICATE, STATUS
from mansio.metadata.metadata_store import Ambiguous, StoreCounts

if TYPE_CHECKING:
    from mansio.metadata.etcd.call_outcome import Failure
    from mansio.metadata.etcd.channel import Metadata
    from mansio.metadata.etcd.config import EtcdConfig
    from mansio.metadata.etcd.messages import Method
    from mansio.ports import Random

Request = TypeVar("Request")
Answer = TypeVar("Answer")

CALLS_DEADLINE_S: Final = 3.0
"""Deadline of all attempts of one call: longer than etcd takes to elect a leader."""
TOKENS_PER_CALL_MAX: Final = 2
AUTHENTICATE_DEADLINE_S: Final = 5.0
"""etcd hashes the password with bcrypt, which takes more than a second on an overloaded machine."""

BACKOFF_S: Final = 0.02
BACKOFF_S_MAX: Final = 0.5

logger = logging.getLogger(__name__)


class Member(NamedTuple):
    """Status of one endpoint. `reason`: why it has none, otherwise empty."""

    endpoint: str
    version: str = ""
    leads: bool = False
    database_bytes: int = 0
    alarms: tuple[str, ...] = ()
    reason: str = ""


class OpenStream(NamedTuple, Generic[Request, Answer]):
    """A stream with its endpoint and the token with which it was opened."""

    stream: Stream[Request, Answer]
    endpoint: Endpoint
    token: str | None


class StreamFailed(Exception):
    """A stream that could not be opened."""

    def __init__(self, failure: Failure, endpoint: Endpoint, token: str | None) -> None:
        super().__init__(failure.error.message)
        self.failure = failure
        self.endpoint = endpoint
        self.token = token


class EtcdClient:
    """Client of an etcd cluster. Create it with `open` and close it on the loop that uses it."""

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
        self._answered = self._ambiguous = 0
        self._failed = {outcome.name.lower(): 0 for outcome in Outcome}

    @property
    def counts(self) -> StoreCounts:
        """Calls by outcome; a broken watch counts as a call. Calls of the keep-alive thread are not included."""
        return StoreCounts(self._answered, self._ambiguous, dict(self._failed))

    @classmethod
    async def open(cls, config: EtcdConfig, random: Random) -> EtcdClient:
        """Check every endpoint that responds. Raises `EtcdUnsupported`, `EtcdDenied`, and `Unavailable` if none
        responds."""
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
        """The current endpoint."""
        return self._endpoints[self._current].url

    async def close(self) -> None:
        """Close all connections; calls in progress fail. Idempotent."""
        self._closed = True
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    async def call(
        self, method: Method[Request, Answer], request: Request, *, repeatable: bool = True
    ) -> Answer:
        """Execute a call. Raises `Ambiguous` if a call that is not `repeatable` may have been executed, otherwise the
        error of the last attempt."""
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
                if failed.failure.outcome is Outcome.UNKNOWN and not repeatable:
                    self._failed["unknown"] += 1
                    self._ambiguous += 1
                    self._leave(endpoint, failed.failure)
                    raise Ambiguous(f"{failed.failure.error.message}: it may have been executed") from failed
                await self.handle_failure(endpoint, failed.failure, token, attempts)
                continue
            self._answered += 1
            self.answered(endpoint)
            return answer

    async def stream(self, method: Method[Request, Answer]) -> OpenStream[Request, Answer]:
        """Open a stream to the current endpoint. Raises `StreamFailed`: call `handle_failure` with its attributes,
        then retry."""
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
        """Prepare another attempt after a failure at `endpoint` with `token`, or raise its error."""
        self._failed[failure.outcome.name.lower()] += 1
        if failure.outcome is Outcome.REFUSED:
            raise failure.error
        if failure.outcome is Outcome.STALE_TOKEN:
            if self._config.user is None or not attempts.another_token():
                raise failure.error
            if self._token == token:
                self._token = None
            return
        if failure.rotate:
            self._leave(endpoint, failure)
        if not await attempts.pause():
            raise failure.error

    def answered(self, endpoint: Endpoint) -> None:
        """Record a successful call."""
        if self._is_failing:
            self._is_failing = False
            logger.info("etcd_available", extra=fields(endpoint=endpoint.url))

    async def members(self) -> list[Member]:
        """The status of each endpoint, including those that do not respond."""
        return await asyncio.gather(*(self._member(endpoint) for endpoint in self._endpoints))

    async def _member(self, endpoint: Endpoint) -> Member:
        try:
            status = await endpoint.call(STATUS, rpc.StatusRequest(), self._metadata(), CALL_DEADLINE_S)
        except CallFailed as failed:
            return Member(endpoint.url, reason=failed.failure.error.message)
        leads = status.leader == status.header.member_id
        return Member(endpoint.url, status.version, leads, status.db_size, tuple(status.errors))

    async def _check_all(self) -> None:
        reasons = []
        for number in reversed(range(len(self._endpoints))):
            try:
                await self._prepare(self._endpoints[number])
            except CallFailed as failed:
                is_denied = failed.failure.outcome is Outcome.STALE_TOKEN and self._config.user is None
                is_refused = failed.failure.outcome is Outcome.REFUSED
                if is_denied or is_refused or isinstance(failed.failure.error, EtcdUnsupported):
                    raise failed.failure.error from failed
                reasons.append(failed.failure.error.message)
            else:
                self._current = number
        if len(reasons) == len(self._endpoints):
            raise Unavailable(f"{'; '.join(reversed(reasons))}; a broker requires a running etcd")

    async def _prepare(self, endpoint: Endpoint) -> None:
        """Make sure that there is a token and that the endpoint is checked."""
        if self._closed:
            raise Unavailable("the connection to etcd is closed")
        if self._config.user is not None and self._token is None:
            await self._authenticating.run(lambda: self._authenticate(endpoint))
        if not endpoint.checked:
            self._cluster_id = await endpoint.check(self._metadata(), self._cluster_id)

    async def _authenticate(self, endpoint: Endpoint) -> None:
        request = rpc.AuthenticateRequest(name=self._config.user, password=self._config.password)
        try:
            answer = await endpoint.call(AUTHENTICATE, request, (HAS_LEADER,), AUTHENTICATE_DEADLINE_S)
            self._token = answer.token
        except CallFailed as failed:
            if not isinstance(failed.failure.error, EtcdWithoutUsers):
                raise
            self._token = ""  # when users are added, calls fail with a missing token

    def _metadata(self) -> Metadata:
        return (HAS_LEADER, ("token", self._token)) if self._token else (HAS_LEADER,)

    def _leave(self, endpoint: Endpoint, failure: Failure) -> None:
        endpoint.require_check()
        if self._endpoints[self._current] is endpoint:
            self._current = (self._current + 1) % len(self._endpoints)
        if not self._is_failing:
            self._is_failing = True
            logger.warning(
                "etcd_unavailable", extra=fields(endpoint=endpoint.url, reason=failure.error.message)
            )


class Attempts:
    """Number and duration of the attempts of one call. Pauses grow and are randomized."""

    def __init__(self, random: Random, deadline_s: float | None = CALLS_DEADLINE_S) -> None:
        """`deadline_s` None: no limit."""
        self._random = random
        self._now = asyncio.get_running_loop().time
        self._end = None if deadline_s is None else self._now() + deadline_s
        self._pause_s = BACKOFF_S
        self._tokens = 0

    def another_token(self) -> bool:
        self._tokens += 1
        return self._tokens <= TOKENS_PER_CALL_MAX

    async def pause(self) -> bool:
        """Wait before the next attempt. Returns False if there is no time for another one."""
        pause_s = self._pause_s * self._random.uniform(0.5, 1.0)
        if self._end is not None and self._now() + pause_s >= self._end:
            return False
        self._pause_s = min(2 * self._pause_s, BACKOFF_S_MAX)
        await asyncio.sleep(pause_s)
        return True

    def reset(self) -> None:
        """Restart the backoff after a success."""
        self._pause_s, self._tokens = BACKOFF_S, 0
