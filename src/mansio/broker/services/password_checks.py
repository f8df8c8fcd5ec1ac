"""Checks of passwords that clients send (PLAIN, HTTP Basic): one worker thread with a bounded queue, and a cache.

A check computes 4,096 to 16,384 rounds of HMAC. One runs at a time, and the others wait in a queue in front of the
thread, so that it is never busy for a client that has gone, and clients that are not authenticated cannot delay other
work of the broker.

Accepted passwords are remembered for `CACHE_S`, under a key from which nobody can find the password: HMAC of user,
password and revision of the credential, with random bytes of this process. Wrong ones are never remembered. An address
from which too many wrong passwords came has to wait, without a check (`WrongCredentials`); its users with remembered
passwords do not.

Invariant: a refusal says nothing about the password: it was not checked. The caller closes the connection, so that the
client tries again, instead of reporting a wrong password.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.services.wrong_credentials import WrongCredentials
from mansio.state.authentication.outcomes import Accepted, Refused, Rejected

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Background, Clock, Random
    from mansio.state.authentication.plain import PasswordCheck

QUEUE_MAX: Final = 256
"""Maximum number of checks that wait or run."""

CACHE_S: Final = 60.0
"""Time for which an accepted password is remembered."""

CACHE_ENTRIES_MAX: Final = 10_000

PROCESS_KEY_BYTES: Final = 32

QUEUE_FULL: Final = "queue_full"
"""Reason of a `Refused`."""

if TYPE_CHECKING:
    Outcome = Accepted | Rejected | Refused


class _Waiting(NamedTuple):
    check: PasswordCheck
    key: bytes
    address: str
    on_done: Callable[[Outcome], None]
    is_wanted: Callable[[], bool]


class _Remembered(NamedTuple):
    accepted: Accepted
    until_s: float


class PasswordChecker:
    """Checks passwords of one broker. All methods run on its event loop."""

    __slots__ = (
        "_clock",
        "_is_running",
        "_process_key",
        "_queue",
        "_random",
        "_remembered",
        "_thread",
        "_wrong",
        "run_count",
    )

    def __init__(self, thread: Background, clock: Clock, random: Random) -> None:
        self._thread = thread
        self._clock = clock
        self._random = random
        self._process_key = b""
        self._queue: deque[_Waiting] = deque()
        self._is_running = False
        self._remembered: OrderedDict[bytes, _Remembered] = OrderedDict()
        self._wrong = WrongCredentials(clock)
        self.run_count = 0
        """Number of checks that ran on the thread."""

    @property
    def waiting_count(self) -> int:
        """Number of checks that wait or run."""
        return len(self._queue) + self._is_running

    def stop(self) -> None:
        """Drop the checks that wait, because the broker is stopping."""
        self._queue.clear()

    def begin(
        self,
        check: PasswordCheck,
        address: str,
        on_done: Callable[[Outcome], None],
        is_wanted: Callable[[], bool],
    ) -> Outcome | None:
        """Begin a check for a client at `address`. Return the outcome if it is known at once; otherwise return None,
        and call `on_done` later, once, if `is_wanted` returns true when its turn comes."""
        if not self._process_key:  # made when it is needed: most brokers check no password
            self._process_key = self._random.bytes(PROCESS_KEY_BYTES)
        key = check.cache_key(self._process_key)
        known = self._recall(key) or self._wrong.refuse(address)
        if known is not None:
            return known
        if self.waiting_count >= QUEUE_MAX:
            return Refused(QUEUE_FULL)
        self._queue.append(_Waiting(check, key, address, on_done, is_wanted))
        self._run_next()
        return None

    def _run_next(self) -> None:
        while self._queue and not self._is_running:
            waiting = self._queue.popleft()
            if not waiting.is_wanted():
                continue
            known = self._recall(waiting.key) or self._wrong.refuse(waiting.address)
            if known is not None:
                waiting.on_done(known)
                continue
            self._is_running = True
            self.run_count += 1
            work = partial(waiting.check.run, self._clock.wall_ms())
            self._thread.submit(work, partial(self._complete, waiting))

    def _complete(
        self, waiting: _Waiting, outcome: Accepted | Rejected | None, error: BaseException | None
    ) -> None:
        self._is_running = False
        if isinstance(outcome, Accepted):
            self._remember(waiting.key, outcome)
        else:
            self._wrong.count(waiting.address)
        try:
            waiting.on_done(outcome or Rejected(f"the check failed: {type(error).__name__}"))
        finally:
            self._run_next()

    def _recall(self, key: bytes) -> Accepted | None:
        found = self._remembered.get(key)
        if found is None:
            return None
        end_ms = found.accepted.valid_until_ms
        if found.until_s <= self._clock.monotonic() or (
            end_ms is not None and end_ms <= self._clock.wall_ms()
        ):
            del self._remembered[key]
            return None
        return found.accepted

    def _remember(self, key: bytes, accepted: Accepted) -> None:
        self._remembered[key] = _Remembered(accepted, self._clock.monotonic() + CACHE_S)
        self._remembered.move_to_end(key)
        if len(self._remembered) > CACHE_ENTRIES_MAX:
            self._remembered.popitem(last=False)
