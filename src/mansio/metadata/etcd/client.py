"""Calls to an etcd of several members: which of them is asked, how often, and with which token.

Owns one `Endpoint` per address and the token. Calls go to one endpoint as long as it answers; when it does not, all
calls move on to the next. Always true: a call that may have happened is made again only if it is `repeatable`; a call
is tried for `CALLS_DEADLINE_S` at most; two calls never fetch a token at the same time.
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
"""Of all attempts of one call together: longer than etcd takes to elect a leader."""
TOKENS_PER_CALL_MAX: Final = 2
BACKOFF_S: Final = 0.02
BACKOFF_S_MAX: Final = 0.5

logger = logging.getLogger(__name__)


class Member(NamedTuple):
    """What one endpoint says of itself. `reason`: why it says nothing, else empty."""

    endpoint: str
    version: str = ""
    leads: bool = False
    database_bytes: int = 0
    alarms: tuple[str, ...] = ()
    reason: str = ""


class OpenStream(NamedTuple, Generic[Request, Answer]):
    """A stream, the endpoint it goes to, and the token it was begun with."""

    stream: Stream[Request, Answer]
    endpoint: Endpoint
    token: str | None


class StreamFailed(Exception):
    """A stream that did not begin."""

    def __init__(self, failure: Failure, endpoint: Endpoint, token: str | None) -> None:
        super().__init__(failure.error.message)
        self.failure = failure
        self.endpoint = endpoint
        self.token = token


class EtcdClient:
    """Made by `open`, on the loop that uses it; closed there."""

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
        """How calls ended so far; a watch that breaks is one, too. Those of the keep-alive's thread are not here."""
        return StoreCounts(self._answered, self._ambiguous, dict(self._failed))

    @classmethod
    async def open(cls, config: EtcdConfig, random: Random) -> EtcdClient:
        """Look at every endpoint that answers. Raises `EtcdUnsupported`, `EtcdDenied`, and `Unavailable` if none
        does."""
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
        """Which one is asked now."""
        return self._endpoints[self._current].url

    async def close(self) -> None:
        """Calls under way fail. Closing twice is harmless."""
        self._closed = True
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    async def call(
        self, method: Method[Request, Answer], request: Request, *, repeatable: bool = True
    ) -> Answer:
        """Raises `Ambiguous` where a call that is not `repeatable` may have happened, else what it came to."""
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
                    raise Ambiguous(f"{failed.failure.error.message}: it may have happened") from failed
                await self.handle_failure(endpoint, failed.failure, token, attempts)
                continue
            self._answered += 1
            self.answered(endpoint)
            return answer

    async def stream(self, method: Method[Request, Answer]) -> OpenStream[Request, Answer]:
        """Begin a stream where calls go now. Raises `StreamFailed`: `handle_failure` with what is in it, then
        begin again."""
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
        """After a failure at `endpoint` with `token`: make another attempt sensible, or raise what failed."""
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
        """Note that all is well."""
        if self._is_failing:
            self._is_failing = False
            logger.info("etcd answers", extra=fields(endpoint=endpoint.url))

    async def members(self) -> list[Member]:
        """What each endpoint says of itself, those that say nothing included."""
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
            raise Unavailable(f"{'; '.join(reversed(reasons))}; a broker starts when its etcd runs")

    async def _prepare(self, endpoint: Endpoint) -> None:
        """Have a token, and know who answers there."""
        if self._closed:
            raise Unavailable("the connection to etcd is closed")
        if self._config.user is not None and self._token is None:
            await self._authenticating.run(lambda: self._authenticate(endpoint))
        if not endpoint.checked:
            self._cluster_id = await endpoint.check(self._metadata(), self._cluster_id)

    async def _authenticate(self, endpoint: Endpoint) -> None:
        request = rpc.AuthenticateRequest(name=self._config.user, password=self._config.password)
        try:
            answer = await endpoint.call(AUTHENTICATE, request, (HAS_LEADER,), CALL_DEADLINE_S)
            self._token = answer.token
        except CallFailed as failed:
            if not isinstance(failed.failure.error, EtcdWithoutUsers):
                raise
            self._token = ""  # once it has users, it says that a token is missing

    def _metadata(self) -> Metadata:
        return (HAS_LEADER, ("token", self._token)) if self._token else (HAS_LEADER,)

    def _leave(self, endpoint: Endpoint, failure: Failure) -> None:
        endpoint.require_check()
        if self._endpoints[self._current] is endpoint:
            self._current = (self._current + 1) % len(self._endpoints)
        if not self._is_failing:
            self._is_failing = True
            logger.warning(
                "etcd does not answer", extra=fields(endpoint=endpoint.url, reason=failure.error.message)
            )


class Attempts:
    """How often, and until when, one call is tried again. The pauses grow, and differ between clients."""

    def __init__(self, random: Random, deadline_s: float | None = CALLS_DEADLINE_S) -> None:
        """`deadline_s` None: for ever."""
        self._random = random
        self._now = asyncio.get_running_loop().time
        self._end = None if deadline_s is None else self._now() + deadline_s
        self._pause_s = BACKOFF_S
        self._tokens = 0

    def another_token(self) -> bool:
        self._tokens += 1
        return self._tokens <= TOKENS_PER_CALL_MAX

    async def pause(self) -> bool:
        """False: there is no time for another attempt."""
        pause_s = self._pause_s * self._random.uniform(0.5, 1.0)
        if self._end is not None and self._now() + pause_s >= self._end:
            return False
        self._pause_s = min(2 * self._pause_s, BACKOFF_S_MAX)
        await asyncio.sleep(pause_s)
        return True

    def reset(self) -> None:
        """It went well: the next trouble is another one."""
        self._pause_s, self._tokens = BACKOFF_S, 0
