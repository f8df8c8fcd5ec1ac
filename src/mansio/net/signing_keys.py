"""The keys of an issuer of tokens (JWKS), read from a URL or a file at the start and from time to time.

They are read again every `refresh_ms`; when a token names a key that is not among them, at most once in
`REQUESTED_INTERVAL_MS`, so that nobody makes the broker fetch as often as one likes; and after a failure with growing
delays.

Invariants:
* Keys that were read stay in use when a later attempt fails.
* A failure is logged once, until an attempt succeeds or fails in another way.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mansio.errors import MansioError, StorageError
from mansio.logs import fields
from mansio.net.https import request
from mansio.ports import complete, complete_from
from mansio.state.authentication.bearer_tokens import DOCUMENT_BYTES_MAX, parse_keys
from mansio.tracebacks import result_of

if TYPE_CHECKING:
    from mansio.config.tokens import KeyLocation
    from mansio.ports import Background, Backoff, Clock, Promise, Scheduler, Timer
    from mansio.state.authentication.bearer_tokens import KeySet

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_MS: Final = 5_000
REQUESTED_INTERVAL_MS: Final = 10_000
"""Minimum time between the ends of an attempt and of one that a token has caused."""


class SigningKeys:
    """The keys of one issuer. Belongs to one event loop."""

    def __init__(
        self,
        location: KeyLocation,
        *,
        scheduler: Scheduler,
        thread: Background,
        clock: Clock,
        refresh_ms: int,
        backoff: Backoff,
    ) -> None:
        """`thread`: reads files; `backoff`: after failures."""
        self._location = location
        self._scheduler = scheduler
        self._thread = thread
        self._clock = clock
        self._refresh_ms = refresh_ms
        self._backoff = backoff
        self._task: Timer | None = None
        self._first: Promise[None] | None = None
        """Done after the first attempt."""
        self._wake: Promise[None] | None = None
        """Ends the present wait."""
        self._tried_at = 0.0
        self.keys: KeySet | None = None
        """The keys that were read last; None: none were read yet."""
        self.failure = ""
        """Why the last attempt failed; "" if it did not."""
        self.loads = 0
        """Number of attempts that succeeded."""
        self.failures = 0
        """Number of attempts that failed."""

    @property
    def source(self) -> str:
        """The URL or the file."""
        return self._location.url or self._location.path

    async def start(self) -> None:
        """Begin to read the keys, and wait for the first attempt, whether or not it succeeds."""
        self._first = self._scheduler.promise()
        self._task = self._scheduler.spawn(self._run(), name="signing-keys")
        await self._first

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def refresh(self) -> None:
        """Read the keys again soon, unless that was tried just now."""
        since_ms = (self._clock.monotonic() - self._tried_at) * 1000
        if self._wake is not None and since_ms >= REQUESTED_INTERVAL_MS:
            complete(self._wake, None)

    async def _run(self) -> None:
        failed = 0
        while True:
            failed = 0 if await self._load() else failed + 1
            self._tried_at = self._clock.monotonic()
            assert self._first is not None
            complete(self._first, None)
            delay_ms = self._backoff.delay_ms(failed) if failed else self._refresh_ms
            self._wake = self._scheduler.promise()
            timer = self._scheduler.call_later(delay_ms, complete, self._wake, None)
            try:
                await self._wake
            finally:
                self._wake = None
                timer.cancel()

    async def _load(self) -> bool:
        try:
            keys = parse_keys(await self._read())
        except MansioError as error:
            self.failures += 1
            if error.message != self.failure:
                remains = "no token is accepted" if self.keys is None else "the keys that were read before"
                known = fields(source=self.source, reason=error.message, remains=remains)
                logger.warning("token_keys_not_read", extra=known)
            self.failure = error.message
            return False
        if self.failure or self.keys is None:
            logger.info("token_keys_read", extra=fields(source=self.source, keys=len(keys)))
        self.keys, self.failure = keys, ""
        self.loads += 1
        return True

    async def _read(self) -> bytes:
        if self._location.path:
            promise: Promise[bytes] = self._scheduler.promise()
            path = self._location.path
            self._thread.submit(lambda: _read_file(path), lambda *done: complete_from(promise, *done))
            return await result_of(promise)
        answer = await request(self._location.url, bytes_max=DOCUMENT_BYTES_MAX, timeout_ms=FETCH_TIMEOUT_MS)
        if answer.status != 200:
            raise StorageError(f"the answer has the status {answer.status}")
        return answer.body


def _read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from None
