"""How an internal topic's log is read: once, in order, without holding up the loop.

Two kinds of topics. Of a compacted one only the newest value of each key counts, so all is read before anything is
applied. Of one whose records change what those before them said, each is applied as it is read.

Always true: a record whose bytes are not what its CRC says is not applied; reading ends when the leadership does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.wire.batch.record_batch import check_stored_batch
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.broker.coordinator.view import CoordinatorContext, CoordinatorView
    from mansio.wire.batch.record_reader import Record

BATCH_OUTPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest batch of an internal topic, opened. We wrote it, so this only guards against damage."""

RECORDS_PER_YIELD: Final = 2000
"""Loading and checkpointing give the loop back after so many records."""

UPDATES_PER_YIELD: Final = 100
"""The same of a load that applies each record as it comes, which takes ten times as long: a loop that hangs for longer
than a session lasts costs the broker its leaderships, and whoever takes them over has the same to load."""


async def replay_latest_per_key(
    context: CoordinatorContext,
    view: CoordinatorView,
    yield_to_loop: Callable[[], Awaitable[None]],
    start: tuple[int, list[tuple[bytes, bytes]]] | None,
) -> None:
    """Read all, then apply the newest value of each key. `start`: what a checkpoint knows up to which offset."""
    position = context.opened().log.start_offset
    newest: dict[bytes, tuple[bytes, int]] = {}
    if start is not None:
        position, pairs = start
        newest = {key: (value, position - 1) for key, value in pairs}
    context.tail = position

    def take(record: Record) -> None:
        if record.key is None:
            return
        if record.value is None:
            newest.pop(record.key, None)
        else:
            newest[record.key] = (record.value, record.offset)

    await _read(context, position, yield_to_loop, take, RECORDS_PER_YIELD)
    for count, (key, (value, offset)) in enumerate(newest.items(), start=1):
        if context.gone:
            return
        view.apply(context.index, key, value, offset)
        if count % RECORDS_PER_YIELD == 0:
            await yield_to_loop()


async def replay_every_record(
    context: CoordinatorContext, view: CoordinatorView, yield_to_loop: Callable[[], Awaitable[None]]
) -> None:
    """Apply each record as it comes."""
    position = context.tail = context.opened().log.start_offset

    def take(record: Record) -> None:
        if record.key is not None:
            view.apply(context.index, record.key, record.value, record.offset)

    await _read(context, position, yield_to_loop, take, UPDATES_PER_YIELD)


async def _read(
    context: CoordinatorContext,
    position: int,
    yield_to_loop: Callable[[], Awaitable[None]],
    take: Callable[[Record], None],
    records_per_yield: int,
) -> None:
    """Hand over the records from `position` on, as long as the leadership lasts."""
    if position >= context.opened().end_offset:
        return
    since_breath = 0
    for batch in context.opened().log.batches(position):
        check_stored_batch(batch)  # a flipped bit must not become somebody's offset
        for record in read_records(batch, max_output_bytes=BATCH_OUTPUT_BYTES_MAX):
            since_breath += 1
            if record.offset >= position:
                take(record)
        context.appended_bytes += len(batch)
        if since_breath >= records_per_yield:
            since_breath = 0
            await yield_to_loop()
            if context.gone:  # the log may have been cut since
                return
