"""How an internal topic's log is read: once, in order, without holding up the loop.

Two kinds of topics. Of a compacted one only the newest value of each key counts, so all is read before anything is
applied. Of one whose records change what those before them said, each is applied as it is read.

Always true: a record whose bytes are not what its CRC says is not applied; reading ends when the leadership does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.wire.record_reader import read_records
from mansio.wire.records import check_stored_batch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.broker.internal_view import HeldView, View
    from mansio.wire.record_reader import Record

BATCH_OUTPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest batch of an internal topic, opened. We wrote it, so this only guards against damage."""

RECORDS_PER_TURN: Final = 2000
"""Loading and checkpointing give the loop back after so many records."""

UPDATES_PER_TURN: Final = 100
"""The same of a load that applies each record as it comes, which takes ten times as long: a loop that hangs for longer
than a session lasts costs the broker its leaderships, and whoever takes them over has the same to load."""


async def load_newest(
    held: HeldView,
    view: View,
    breathe: Callable[[], Awaitable[None]],
    start: tuple[int, list[tuple[bytes, bytes]]] | None,
) -> None:
    """Read all, then apply the newest value of each key. `start`: what a checkpoint knows up to which offset."""
    position = held.opened().log.start_offset
    newest: dict[bytes, tuple[bytes, int]] = {}
    if start is not None:
        position, pairs = start
        newest = {key: (value, position - 1) for key, value in pairs}
    held.tail = position

    def take(record: Record) -> None:
        if record.key is None:
            return
        if record.value is None:
            newest.pop(record.key, None)
        else:
            newest[record.key] = (record.value, record.offset)

    await _read(held, position, breathe, take, RECORDS_PER_TURN)
    for count, (key, (value, offset)) in enumerate(newest.items(), start=1):
        if held.gone:
            return
        view.apply(held.index, key, value, offset)
        if count % RECORDS_PER_TURN == 0:
            await breathe()


async def load_every_record(held: HeldView, view: View, breathe: Callable[[], Awaitable[None]]) -> None:
    """Apply each record as it comes."""
    position = held.tail = held.opened().log.start_offset

    def take(record: Record) -> None:
        if record.key is not None:
            view.apply(held.index, record.key, record.value, record.offset)

    await _read(held, position, breathe, take, UPDATES_PER_TURN)


async def _read(
    held: HeldView,
    position: int,
    breathe: Callable[[], Awaitable[None]],
    take: Callable[[Record], None],
    records_per_turn: int,
) -> None:
    """Hand over the records from `position` on, as long as the leadership lasts."""
    if position >= held.opened().end_offset:
        return
    since_breath = 0
    for batch in held.opened().log.batches(position):
        check_stored_batch(batch)  # a flipped bit must not become somebody's offset
        for record in read_records(batch, max_output_bytes=BATCH_OUTPUT_BYTES_MAX):
            since_breath += 1
            if record.offset >= position:
                take(record)
        held.appended_bytes += len(batch)
        if since_breath >= records_per_turn:
            since_breath = 0
            await breathe()
            if held.gone:  # the log may have been cut since
                return
