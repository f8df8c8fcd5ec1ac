"""Keeps a broker's lease alive from a thread of its own, as long as the main loop shows signs of life.

Owns the thread and the sign. In a thread, because a main loop that is busy for some seconds must not cost a broker its
session; with a sign, because one that hangs must: nobody else would ever take over what it leads.

Always true: a renewal counts from before it was sent; nothing is renewed for a loop that gave no sign of life lately;
the loop is told once of each session that the store says is no more. Each call is bounded by whoever provides it.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from mansio.errors import MansioError
from mansio.logs import fields
from mansio.metadata.metadata_store import LeaseExpired
from mansio.metadata.session import RENEW_FRACTION, Liveness

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.metadata.session import Session
    from mansio.ports import Clock, Scheduler, Timer

logger = logging.getLogger(__name__)

RETRY_SHARE: Final = 0.25
"""Of the time between two renewals: how soon one that failed is tried again."""
BEATS_PER_RENEWAL: Final = 4
STOP_S_MAX: Final = 2.0


class LeaseKeepAlive:
    """See the module. `start` and `stop` belong to the loop."""

    def __init__(
        self,
        *,
        keep_alive_once: Callable[[int], float],
        current: Callable[[], Session | None],
        on_ended: Callable[[Session], None],
        clock: Clock,
        scheduler: Scheduler,
        ttl_s: float,
    ) -> None:
        """`keep_alive_once(lease)` blocks, for about a second at most, and returns the seconds the lease has left; it
        raises `LeaseExpired`, or anything else when it did not work. `current` is the session to keep
        (`BrokerLifecycle.kept`), `on_ended` hears on the loop of one that ended (`BrokerLifecycle.lost`)."""
        self._keep_alive_once = keep_alive_once
        self._current = current
        self._on_ended = on_ended
        self._clock = clock
        self._scheduler = scheduler
        self._interval_s = RENEW_FRACTION * ttl_s
        self._liveness = Liveness(ttl_s, clock.monotonic())
        self._stopped = threading.Event()
        self._told: str | None = None
        self._beat_timer: Timer | None = None
        self._thread = threading.Thread(target=self._run, name="mansio-keep-alive", daemon=True)

    def start(self) -> None:
        """Keep whatever session is the current one, until `stop`."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Renew nothing any more. A call that hangs is left to itself."""
        if self._beat_timer is not None:
            self._beat_timer.cancel()
            self._beat_timer = None
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S_MAX)

    def _beat(self) -> None:
        self._liveness.record(self._clock.monotonic())
        self._beat_timer = self._scheduler.call_later(1000 * self._interval_s / BEATS_PER_RENEWAL, self._beat)

    # On the thread

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stopped.wait(wait_s):
            session = self._current()
            worked = session is None or session.ended or self._renew(session)
            wait_s = self._interval_s * (1 if worked and session is not None else RETRY_SHARE)

    def _renew(self, session: Session) -> bool:
        sent_at = self._clock.monotonic()
        if not self._liveness.is_fresh(sent_at):
            self._tell("lease not renewed: the main loop hangs")
            return False
        try:
            left_s = self._keep_alive_once(session.lease)
            if left_s <= 0:
                raise LeaseExpired
        except LeaseExpired:
            session.end()
            self._end(session)
            return True
        except Exception as error:  # noqa: BLE001  # whatever it was: without this thread there is no broker
            self._tell("lease not renewed", error.message if isinstance(error, MansioError) else repr(error))
            return False
        session.renewed(sent_at, left_s)
        self._told = None
        return True

    def _end(self, session: Session) -> None:
        try:
            self._scheduler.call_from_thread(self._on_ended, session)
        except RuntimeError as refused:  # the loop is closed: there is nobody left to tell
            logger.warning("session_ended_after_loop_closed", extra=fields(refused=refused))

    def _tell(self, event: str, reason: str = "") -> None:
        """Once per kind of trouble, until it is over."""
        if self._told != event:
            self._told = event
            logger.warning(event, extra=fields(reason=reason) if reason else fields())
