"""What the state topic keeps of one share partition, for models: updates in order, folded into one entry an offset."""

from __future__ import annotations

from mansio.state.share_types import Change, DeadRange, LoadedState, Producer, Redrive, Update


def expand(changes: tuple[Change, ...]) -> dict[int, Change]:
    return {offset: change for change in changes for offset in range(change.first, change.last + 1)}


def at_offset(change: Change, offset: int) -> Change:
    """What a change says of one of its offsets."""
    ticket = change.ticket
    if ticket is not None and ticket.sequence >= 0:
        ticket = ticket._replace(sequence=(ticket.sequence + offset - change.first) & (2**31 - 1))
    return change._replace(first=offset, last=offset, ticket=ticket)


class Store:
    """`log` up to `synced` survives everything."""

    def __init__(self) -> None:
        self.log = [Update(0, durable=True, start_offset=0, horizon=20, done_count=0)]
        self.synced = 1

    def append(self, update: Update) -> None:
        self.log.append(update)
        if update.durable:
            self.synced = len(self.log)

    def fold(self, *, certain: bool = True, withheld_ms: int = 0) -> LoadedState:
        start, horizon = 0, 0
        offsets: dict[int, Change] = {}
        dead: tuple[DeadRange, ...] = ()
        redrives: tuple[Redrive, ...] = ()
        producer: Producer | None = None
        for update in self.log:
            if update.snapshot:
                start, offsets = update.start_offset, {}
            start, horizon = max(start, update.start_offset), max(horizon, update.horizon)
            offsets |= {o: at_offset(change, o) for o, change in expand(update.changes).items()}
            dead = (dead if update.dead is None else update.dead) + update.dead_added
            redrives = redrives if update.redrives is None else update.redrives
            producer = update.producer or producer
        changes = tuple(change for o, change in sorted(offsets.items()) if o >= start)
        return LoadedState(
            0,
            0,
            0,
            start,
            horizon,
            0,
            changes,
            dead,
            redrives,
            producer,
            certain=certain,
            withheld_ms=withheld_ms,
        )
