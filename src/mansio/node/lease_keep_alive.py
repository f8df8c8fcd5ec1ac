"""Lease keep-alive: renews a broker's lease from a separate thread, as long as the event loop responds.

A thread renews the lease, so that a broker whose event loop is busy for a few seconds keeps its session. If the event
loop is blocked for longer, the thread stops renewing it, so that the session ends and other brokers take over its
leaderships.

Invariants:
* The lease time of a renewal counts from the time before the renewal was sent.
* The lease is not renewed if the event loop has not responded recently (`Liveness`).
* The event loop is notified once of each session that has expired in the store.
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

RETRY_FRACTION: Final = 0.25
"""Delay before a failed renewal is retried, as a fraction of the renewal interval."""
LIVENESS_SIGNALS_PER_RENEWAL: Final = 4
"""How often, per renewal interval, the event loop records that it responds."""
STOP_S_MAX: Final = 2.0


class LeaseKeepAlive:
    """Thread that renews the lease of a broker's session. `start` and `stop` are called on the event loop."""

    def __init__(
        self,
        *,
        keep_alive_once: Callable[[int], float],
        current_session: Callable[[], Session | None],
        on_session_end: Callable[[Session], None],
        clock: Clock,
        scheduler: Scheduler,
        ttl_s: float,
    ) -> None:
        """`keep_alive_once(lease)` renews a lease and returns its remaining seconds. It blocks for about a second at
        most, and raises `LeaseExpired`, or another error if the renewal failed. `current_session` returns the session
        whose lease is renewed (`BrokerLifecycle.session_to_renew`). `on_session_end` is called on the event loop with a
        session whose lease has expired (`BrokerLifecycle.end_session`).
        """
        self._keep_alive_once = keep_alive_once
        self._current_session = current_session
        self._on_session_end = on_session_end
        self._clock = clock
        self._scheduler = scheduler
        self._interval_s = RENEW_FRACTION * ttl_s
        self._liveness = Liveness(ttl_s, clock.monotonic())
        self._stopped = threading.Event()
        self._logged_event: str | None = None
        self._liveness_timer: Timer | None = None
        self._thread = threading.Thread(target=self._run, name="mansio-keep-alive", daemon=True)

    def start(self) -> None:
        """Renew the lease of the current session, until `stop` is called."""
        self._record_liveness()
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing. Waits at most `STOP_S_MAX` for a renewal that is in progress."""
        if self._liveness_timer is not None:
            self._liveness_timer.cancel()
            self._liveness_timer = None
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S_MAX)

    def _record_liveness(self) -> None:
        self._liveness.record(self._clock.monotonic())
        self._liveness_timer = self._scheduler.call_later(
            1000 * self._interval_s / LIVENESS_SIGNALS_PER_RENEWAL, self._record_liveness
        )

    # On the thread

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stopped.wait(wait_s):
            session = self._current_session()
            worked = session is None or session.has_ended or self._renew_lease(session)
            wait_s = self._interval_s * (1 if worked and session is not None else RETRY_FRACTION)

    def _renew_lease(self, session: Session) -> bool:
        sent_at = self._clock.monotonic()
        if not self._liveness.is_fresh(sent_at):
            self._log_once("lease_not_renewed_loop_blocked")
            return False
        try:
            left_s = self._keep_alive_once(session.lease)
            if left_s <= 0:
                raise LeaseExpired
        except LeaseExpired:
            session.end()
            self._end_session(session)
            return True
        except Exception as error:  # noqa: BLE001  # whatever it was: without this thread there is no broker
            self._log_once(
                "lease_not_renewed", error.message if isinstance(error, MansioError) else repr(error)
            )
            return False
        session.record_renewal(sent_at, left_s)
        self._logged_event = None
        return True

    def _end_session(self, session: Session) -> None:
        try:
            self._scheduler.call_from_thread(self._on_session_end, session)
        except RuntimeError as refused:  # the loop is closed
            logger.warning("session_ended_after_loop_closed", extra=fields(refused=refused))

    def _log_once(self, event: str, reason: str = "") -> None:
        """Log a warning, unless it is the same event as the last one."""
        if self._logged_event != event:
            self._logged_event = event
            logger.warning(event, extra=fields(reason=reason) if reason else fields())
