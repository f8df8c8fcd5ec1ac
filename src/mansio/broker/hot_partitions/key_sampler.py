"""Sampling of keys in hot partitions: one batch of each in a second.

It is the batch of a random record of those that were committed since the last sample. The newest one would often be the
same part of what a producer sends, if the producer sends in cycles.

Opening a batch costs far more than counting its keys, so only hot partitions are sampled, and of a large batch only the
first records. The work takes at most `WORK_SHARE_MAX` of one core: after a round that took longer, the next one begins
later.

Invariants:
* Nothing runs while no partition is hot.
* A round reads at most `BATCHES_PER_ROUND_MAX` batches; with more hot partitions, they take turns.
* No key of a topic with `mansio.hot.keys.enable=false` is read, and no key is logged or a label of a metric.
* Only batches below the high watermark are read. One that cannot be read is left out: readers report it.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from mansio.broker.partition.append_validation import INLINE_CONTENT_BYTES_MAX
from mansio.errors import UNREADABLE_CONTENT, MansioError
from mansio.host.item_turns import ItemTurns, Work
from mansio.host.run_in_thread import run_in_thread
from mansio.state.hot_partitions.frequent_keys import RecentKeys
from mansio.wire.batch.compression import DECOMPRESSED_BYTES_MAX
from mansio.wire.batch.record_batch import check_stored_batch, read_header
from mansio.wire.batch.record_reader import read_keys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.broker.partition.partition import Partition
    from mansio.ports import Background, Clock, Random, Scheduler, Timer
    from mansio.state.hot_partitions.frequent_keys import KeySample

ROUND_MS: Final = 1_000
BATCHES_PER_ROUND_MAX: Final = 50
KEYS_PER_BATCH_MAX: Final = 100
"""Number of records of a batch whose keys are read, from the begin of the batch."""
WORK_SHARE_MAX: Final = 0.012
"""Maximum part of one core that sampling takes."""


class _Followed:
    """A hot partition: its keys, and the offset below which it was sampled."""

    __slots__ = ("keys", "sampled_end")

    def __init__(self, sampled_end: int) -> None:
        self.keys = RecentKeys()
        self.sampled_end = sampled_end


class KeySampler:
    """Samples of the keys of hot partitions. All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        clock: Clock,
        random: Random,
        scheduler: Scheduler,
        batch_thread: Background,
        round_ms: float = ROUND_MS,
    ) -> None:
        self._clock = clock
        self._random = random
        self._scheduler = scheduler
        self._batch_thread = batch_thread
        self._round_ms = round_ms
        self._followed: dict[Partition, _Followed] = {}
        """The hot partitions; those whose turn comes first are first."""
        self._work: Timer | None = None
        self.batch_count = 0
        """Number of batches whose keys were read."""

    def follow(self, partitions: Iterable[Partition]) -> None:
        """Sample these partitions from now on, and no other."""
        wanted = dict.fromkeys(partitions)
        kept = {partition: each for partition, each in self._followed.items() if partition in wanted}
        new = [partition for partition in wanted if partition not in kept]
        self._followed = kept | {partition: _Followed(partition.high_watermark) for partition in new}
        if self._followed and self._work is None:
            self._work = self._scheduler.spawn(self._run(), name="sample keys of hot partitions")

    def rotate(self) -> None:
        """Let the keys of the past leave."""
        for followed in self._followed.values():
            followed.keys.rotate()

    def sample(self, partition: Partition, keys_max: int) -> KeySample | None:
        """Return the most frequent keys of a partition; None if its keys are not sampled."""
        followed = self._followed.get(partition)
        if followed is None or not partition.settings.hot_keys_enabled:
            return None
        return followed.keys.sample(keys_max)

    def stop(self) -> None:
        """Stop sampling, and forget all keys."""
        self._followed.clear()
        if self._work is not None:
            self._work.cancel()
            self._work = None

    async def _run(self) -> None:
        try:
            while self._followed:
                worked_s = await self.run_round()
                await self._scheduler.sleep(max(self._round_ms, worked_s / WORK_SHARE_MAX * 1000))
        finally:
            self._work = None

    async def run_round(self) -> float:
        """Read the keys of one batch of each partition whose turn it is; return how long the work took, in seconds."""
        worked_s = 0.0
        turns = ItemTurns(self._scheduler, Work.HOT_PARTITIONS, items_per_look=1)
        for partition in tuple(islice(self._followed, BATCHES_PER_ROUND_MAX)):
            if turns.is_over():
                await turns.pause()
            if (followed := self._followed.pop(partition, None)) is None:
                continue  # not hot any more
            self._followed[partition] = followed
            worked_s += await self._sample(partition, followed)
        turns.end()
        return worked_s

    async def _sample(self, partition: Partition, followed: _Followed) -> float:
        """Read the keys of a batch; return how long that took. A large batch, and one that has to be decompressed, is
        read on the other thread."""
        began = self._clock.monotonic()
        if not partition.settings.hot_keys_enabled:
            followed.keys = RecentKeys()  # without those from before the setting was changed
            return 0.0
        try:
            batch = self._choose_batch(partition, followed)
            if batch is not None and not check_stored_batch(batch).is_control:
                followed.keys.add(await self._read_keys(batch))
                self.batch_count += 1
        except (MansioError, *UNREADABLE_CONTENT):
            pass
        return self._clock.monotonic() - began

    def _choose_batch(self, partition: Partition, followed: _Followed) -> bytes | None:
        """Return the batch of a random record that was committed since the last sample; None if there is none."""
        begin, end = max(followed.sampled_end, partition.start_offset), partition.high_watermark
        if partition.closed or begin >= end:
            return None
        followed.sampled_end = end
        offset = min(end - 1, int(self._random.uniform(begin, end)))
        return next(partition.log.batches(offset), None)

    async def _read_keys(self, batch: bytes) -> list[bytes | None]:
        read = partial(_first_keys, batch)
        if len(batch) <= INLINE_CONTENT_BYTES_MAX and not read_header(batch).codec:
            return read()
        return await run_in_thread(self._scheduler, self._batch_thread, read)


def _first_keys(batch: bytes) -> list[bytes | None]:
    found = read_keys(batch, output_bytes_max=DECOMPRESSED_BYTES_MAX)
    return [key for _, key in islice(found, KEYS_PER_BATCH_MAX)]
