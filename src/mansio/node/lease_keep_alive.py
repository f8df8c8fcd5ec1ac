"""Lease keep-alive: renews a broker's lease from a separate thread, as long as the event loop is responsive.

In a thread, because an event loop that is busy for some seconds must not cost a broker its session; with a liveness
signal, because one that hangs must: otherwise no broker would take over what it leads.

Invariants:
* A renewal counts from before it was sent.
* Nothing is renewed for a loop that has not signalled recently.
* The loop is informed once of each session that has expired in the store. The caller bounds the duration of each call.
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
"""Delay before a failed renewal is retried, as a fraction of the renewal interval."""
BEATS_PER_RENEWAL: Final = 4
STOP_S_MAX: Final = 2.0


class LeaseKeepAlive:
    """`start` and `stop` belong to the event loop."""

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
        """`keep_alive_once(lease)` blocks, for about a second at most, and returns the remaining seconds of the
        lease; it raises `LeaseExpired`, or any other error if it failed. `current` returns the session to keep
        (`BrokerLifecycle.kept`); `on_ended` is called on the loop with one that ended (`BrokerLifecycle.lost`)."""
        self._keep_alive_once = keep_alive_once
        self._current = current
        self._on_ended = on_ended
        self._clock = clock
        self._scheduler = scheduler
        self._interval_s = RENEW_FRACTION * ttl_s
        self._liveness = Liveness(ttl_s, clock.monotonic())
        self._stopped = threading.Event()
        self._logged_event: str | None = None
        self._beat_timer: Timer | None = None
        self._thread = threading.Thread(target=self._run, name="mansio-keep-alive", daemon=True)

    def start(self) -> None:
        """Keep the current session alive until `stop`."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Renew nothing any more. A call that hangs is abandoned."""
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
            self._tell("lease_not_renewed_loop_blocked")
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
            self._tell("lease_not_renewed", error.message if isinstance(error, MansioError) else repr(error))
            return False
        session.renewed(sent_at, left_s)
        self._logged_event = None
        return True

    def _end(self, session: Session) -> None:
        try:
            self._scheduler.call_from_thread(self._on_ended, session)
        except RuntimeError as refused:  # the loop is closed
            logger.warning("session_ended_after_loop_closed", extra=fields(refused=refused))

    def _tell(self, event: str, reason: str = "") -> None:
        """Log once per series of the same error."""
        if self._logged_event != event:
            self._logged_event = event
            logger.warning(event, extra=fields(reason=reason) if reason else fields())
