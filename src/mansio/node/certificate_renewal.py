"""Renewal of a certificate that the broker itself has issued, while it runs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Background, Scheduler, Timer

logger = logging.getLogger(__name__)

RENEWAL_CHECK_MS: Final = 60 * 60 * 1000
"""Time between two checks whether the certificate has to be renewed. It is renewed weeks before it expires, so many
checks may fail."""


class CertificateRenewal:
    """Checks at intervals whether the certificate has to be renewed. Belongs to one event loop."""

    def __init__(
        self,
        renew: Callable[[], bool],
        on_renewed: Callable[[], None],
        scheduler: Scheduler,
        thread: Background,
    ) -> None:
        """`renew` renews the certificate if it is time, and returns whether it has; it runs on the thread, and raises
        `MansioError` or `OSError`. `on_renewed` is called after that on the event loop."""
        self._renew = renew
        self._on_renewed = on_renewed
        self._scheduler = scheduler
        self._thread = thread
        self._failure = ""
        """Why the last check failed; empty if it did not."""
        self._timer: Timer | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Begin the first interval."""
        self._timer = self._scheduler.call_later(RENEWAL_CHECK_MS, self._check)

    def stop(self) -> None:
        """Check no more."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        self._thread.submit(self._renew, self._on_checked)

    def _on_checked(self, is_renewed: bool | None, error: BaseException | None) -> None:
        if self._is_stopped:
            return
        failure = "" if error is None else str(error)
        if failure and failure != self._failure:
            logger.warning("certificate_not_issued", extra=fields(reason=failure, remains="the one before"))
        self._failure = failure
        if is_renewed:
            self._on_renewed()
        self.start()
