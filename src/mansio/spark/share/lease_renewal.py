"""Thread of the driver that keeps the range leases of a batch while its tasks run.

Invariants:
* The thread has a connection of its own, and ends with `stop`.
* A lease that is lost is reported once, and is not kept any more.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from mansio.errors import MansioError
from mansio.net.range_leases import alter_range_leases
from mansio.spark.share.leased_ranges import missing_records
from mansio.spark.sync_client import close_sync_clients, sync_client
from mansio.state.share_partition.types import RangeOperation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.net.range_leases import RangeLease
    from mansio.spark.options import ShareOptions, SourceOptions
    from mansio.wire.topic_partition import TopicPartition

KEPT_PER_LEASE: Final = 3
"""How often leases are kept in the time for which they last."""

STOP_TIMEOUT_S: Final = 60.0
"""Time for which `stop` waits for a request in progress."""

logger = logging.getLogger(__name__)


class LeaseRenewal:
    """Renewal of the leases of one batch of one member."""

    def __init__(
        self,
        options: SourceOptions,
        share: ShareOptions,
        member: str,
        ranges: Mapping[TopicPartition, Sequence[RangeLease]],
    ) -> None:
        """Start the thread."""
        self._options = options
        self._share = share
        self._member = member
        self._ranges = ranges
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mansio-lease-renewal", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Keep the leases no longer; they last until their time ends."""
        self._stopped.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        interval_s = self._share.lease_ms / 1000 / KEPT_PER_LEASE
        try:
            while not self._stopped.wait(interval_s) and self._ranges:
                self._keep()
        finally:
            close_sync_clients()

    def _keep(self) -> None:
        group = self._share.group
        try:
            client = sync_client(self._options.bootstrap_servers, self._options.security)
            found = client.run(
                alter_range_leases(
                    client.cluster,
                    group,
                    self._member,
                    self._ranges,
                    RangeOperation.KEEP,
                    lease_ms=self._share.lease_ms,
                )
            )
        except MansioError as error:  # the next attempt comes before the leases end
            logger.warning("the leases of share group %s were not renewed: %s", group, error)
            return
        kept = {place: each.ranges for place, each in found.items() if each.ranges}
        lost = sum(missing_records(ranges, kept.get(place, ())) for place, ranges in self._ranges.items())
        if lost:
            logger.warning(
                "the query has lost the leases of %d records of share group %s: other members may process them, too",
                lost,
                group,
            )
        self._ranges = kept
