"""What the state topic keeps of one share partition, for models: updates in order, folded into one entry an offset."""

from __future__ import annotations

from mansio.state.share_partition.types import (
    DeadRange,
    LoadedState,
    Producer,
    RedrivenRanges,
    StateBatch,
    Update,
)


def expand(changes: tuple[StateBatch, ...]) -> dict[int, StateBatch]:
    return {offset: change for change in changes for offset in range(change.first, change.last + 1)}


def at_offset(change: StateBatch, offset: int) -> StateBatch:
    """What a change has for one of its offsets."""
    reservation = change.reservation
    if reservation is not None and reservation.sequence >= 0:
        reservation = reservation._replace(
            sequence=(reservation.sequence + offset - change.first) & (2**31 - 1)
        )
    return change._replace(first=offset, last=offset, reservation=reservation)


class Store:
    """`log` up to `synced` survives everything."""

    def __init__(self) -> None:
        self.log = [Update(0, durable=True, start_offset=0, lease_bound=20, done_count=0)]
        self.synced = 1

    def append(self, update: Update) -> None:
        self.log.append(update)
        if update.durable:
            self.synced = len(self.log)

    def fold(self, *, is_complete: bool = True, withheld_ms: int = 0) -> LoadedState:
        start, lease_bound = 0, 0
        offsets: dict[int, StateBatch] = {}
        dead: tuple[DeadRange, ...] = ()
        redrives: tuple[RedrivenRanges, ...] = ()
        producer: Producer | None = None
        for update in self.log:
            if update.is_snapshot:
                start, offsets = update.start_offset, {}
            start, lease_bound = max(start, update.start_offset), max(lease_bound, update.lease_bound)
            offsets |= {o: at_offset(change, o) for o, change in expand(update.changes).items()}
            dead = (dead if update.dead_ranges is None else update.dead_ranges) + update.added_dead_ranges
            redrives = redrives if update.redrives is None else update.redrives
            producer = update.producer or producer
        changes = tuple(change for o, change in sorted(offsets.items()) if o >= start)
        return LoadedState(
            0,
            0,
            0,
            start,
            lease_bound,
            0,
            changes,
            dead,
            redrives,
            producer,
            is_complete=is_complete,
            withheld_ms=withheld_ms,
        )
