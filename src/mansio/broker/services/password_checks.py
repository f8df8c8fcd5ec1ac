"""Checks of passwords that clients send (PLAIN, HTTP Basic): one worker thread with a bounded queue, and a cache.

A check computes 4,096 to 16,384 rounds of HMAC. One runs at a time, and the others wait in a queue in front of the
thread, so that it is never busy for a client that has gone, and clients that are not authenticated cannot delay other
work of the broker.

Accepted passwords are remembered for `CACHE_S`, under a key from which nobody can find the password: HMAC of user,
password and revision of the credential, with random bytes of this process. Wrong ones are never remembered. An address
from which `WRONG_PER_S_MAX` wrong passwords came within a second has to wait, without a check; its users with
remembered passwords do not.

Invariant: a refusal says nothing about the password: it was not checked. The caller closes the connection, so that the
client tries again, instead of reporting a wrong password.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from functools import partial
from ipaddress import IPv6Address, IPv6Network
from typing import TYPE_CHECKING, Final, NamedTuple

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

WRONG_PER_S_MAX: Final = 10
"""Number of wrong passwords in a second after which an address has to wait."""

ADDRESSES_MAX: Final = 10_000
"""Maximum number of addresses whose wrong passwords are counted."""

PROCESS_KEY_BYTES: Final = 32


QUEUE_FULL: Final = "queue_full"
TOO_MANY_WRONG: Final = "too_many_wrong"
"""Reasons of a `Refused`."""

if TYPE_CHECKING:
    Outcome = Accepted | Rejected | Refused


class _Waiting(NamedTuple):
    check: PasswordCheck
    key: bytes
    network: str
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
        self._wrong: OrderedDict[str, _Bucket] = OrderedDict()
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
        key, network = check.cache_key(self._process_key), network_of(address)
        known = self._recall(key) or self._refuse(network)
        if known is not None:
            return known
        if self.waiting_count >= QUEUE_MAX:
            return Refused(QUEUE_FULL)
        self._queue.append(_Waiting(check, key, network, on_done, is_wanted))
        self._run_next()
        return None

    def _run_next(self) -> None:
        while self._queue and not self._is_running:
            waiting = self._queue.popleft()
            if not waiting.is_wanted():
                continue
            known = self._recall(waiting.key) or self._refuse(waiting.network)
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
            self._count_wrong(waiting.network)
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

    def _refuse(self, network: str) -> Refused | None:
        bucket = self._wrong.get(network)
        if bucket is not None and bucket.level(self._clock.monotonic()) >= WRONG_PER_S_MAX:
            return Refused(TOO_MANY_WRONG)
        return None

    def _count_wrong(self, network: str) -> None:
        now_s = self._clock.monotonic()
        bucket = self._wrong.setdefault(network, _Bucket(now_s))
        bucket.add(now_s)
        self._wrong.move_to_end(network)
        if len(self._wrong) > ADDRESSES_MAX:
            self._wrong.popitem(last=False)


def network_of(address: str) -> str:
    """Return what counts as one address: of IPv6 the network of 64 bits, all of which a client usually has."""
    if ":" not in address:
        return address
    try:
        parsed = IPv6Address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped is not None else str(IPv6Network((int(parsed), 64), strict=False))


class _Bucket:
    """Wrong passwords of one address: a level that falls by `WRONG_PER_S_MAX` in a second."""

    __slots__ = ("_at_s", "_level")

    def __init__(self, now_s: float) -> None:
        self._level = 0.0
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Return the level at a time in monotonic seconds."""
        return max(0.0, self._level - (now_s - self._at_s) * WRONG_PER_S_MAX)

    def add(self, now_s: float) -> None:
        """Count one wrong password."""
        self._level = self.level(now_s) + 1
        self._at_s = now_s
