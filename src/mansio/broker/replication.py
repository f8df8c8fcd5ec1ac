"""From the metadata to roles: what this broker leads, what it copies, and from whom.

Puts together what the parts do by themselves: `Partition.lead` and `follow`, the `Follower`, the `InSyncKeeper`.

Always true: news of a leader epoch that is over changes nothing; a broker leads only what it was chosen for in the
session it has now. One that may not lead what it should (its log failed, or knows the epoch from before a restart) says
so and leads nothing until the next epoch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mansio.errors import MansioError
from mansio.logs import fields
from mansio.state.replica import NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.follower import Follower
    from mansio.broker.in_sync import InSyncKeeper
    from mansio.broker.partition import Partition
    from mansio.cluster.model import BrokerChange, PartitionState

logger = logging.getLogger(__name__)


class Replication:
    """See the module. All methods belong to the broker's loop."""

    def __init__(
        self,
        node_id: int,
        *,
        follower: Follower,
        keeper: InSyncKeeper,
        broker_epoch: Callable[[], int],
        gate: Callable[[], bool],
    ) -> None:
        """`broker_epoch`: that of this broker's session now; `gate`: is that session sure to live."""
        self._node_id = node_id
        self.follower = follower
        self.keeper = keeper
        self._broker_epoch = broker_epoch
        self._gate = gate
        self.on_lead: Callable[[], None] = _nobody
        """Called when this broker leads a partition in an epoch in which it did not."""

    def start(self) -> None:
        """Look after what is led here."""
        self.keeper.start()

    def stop(self) -> None:
        """Copy nothing and change nothing any more."""
        self.follower.stop()
        self.keeper.stop()

    def apply(self, partition: Partition, state: PartitionState) -> None:
        """The metadata says this of a partition that is open here."""
        if state.leader_epoch < partition.leader_epoch or partition.closed:
            return
        leads = state.led_by(self._node_id, self._broker_epoch())
        try:
            if leads:
                before = partition.replica
                partition.lead(
                    state.leader_epoch, in_sync=state.isr, replicas=state.replicas, gate=self._gate
                )
                if partition.replica is not before:
                    self.on_lead()
                self.follower.leave(partition)
                self.keeper.lead(partition, state)
                return
            copies = self._node_id in state.replicas and state.leader != self._node_id
            self.keeper.leave(partition)
            partition.follow(state.leader if copies else NOBODY, state.leader_epoch)
        except MansioError as error:
            known = fields(topic=partition.topic, partition=partition.index, reason=error.message)
            logger.error("partition role refused", extra=known)
            self.keeper.leave(partition)
            if leads:
                partition.follow(NOBODY, state.leader_epoch)
        self.follower.follow(partition)

    def leave(self, partition: Partition) -> None:
        """The partition is about to be closed here."""
        self.follower.leave(partition)
        self.keeper.leave(partition)

    def broker_changed(self, change: BrokerChange) -> None:
        """A broker's session began or ended, or another one took its place."""
        if change.before is not None and (change.after is None or change.after.epoch != change.before.epoch):
            self.keeper.session_ended(change.node_id)


def _nobody() -> None:
    """Stands where a listener will be."""
