"""Monitor of hot partitions: measures the rates of the partitions that a broker leads, in windows of 10 s.

An append does nothing for it: at the end of a window, the end offsets of the partitions are compared with those at its
begin. Whether a partition is hot depends on the other partitions of its topic; those that other brokers lead are asked
for (`RateExchange`), if the partition could be hot at all.

Invariants:
* Work between two windows is done only for hot partitions: the sampling of their keys.
* A partition counts in a window only if this broker has led it throughout, in one leader epoch. Internal topics do not
  count.
* The rates of a topic count only if they are all known; otherwise the window does not count for its partitions.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.host.item_turns import ItemTurns, Work
from mansio.logs import fields
from mansio.state.hot_partitions.detector import (
    WINDOWS,
    HotPartitionDetector,
    Skew,
    Thresholds,
    topic_rates,
)
from mansio.state.hot_partitions.remedies import BrokerLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from uuid import UUID

    from mansio.broker.hot_partitions.key_sampler import KeySampler
    from mansio.broker.hot_partitions.rate_exchange import RateExchange
    from mansio.broker.partition.partition import Partition
    from mansio.config.settings import Settings
    from mansio.metadata.image import MetadataImage
    from mansio.ports import Clock, Scheduler, Timer

logger = logging.getLogger(__name__)

SLICE_PAUSE_MS: Final = 5
"""Pause of a measurement of all partitions after each turn."""


class _Seen(NamedTuple):
    """A partition at the end of a window. `led_since`: time from which this broker has led it in this epoch, as far as
    the monitor knows."""

    end_offset: int
    leader_epoch: int
    led_since: float


class HotPartition(NamedTuple):
    """A hot partition of this broker, in the last window. `led_s`: for how long this broker has led it."""

    partition: Partition
    skew: Skew
    led_s: float


class HotPartitionMonitor:
    """Rates and hot partitions of one broker. All methods run on its event loop."""

    def __init__(
        self,
        partitions: Iterable[Partition],
        *,
        settings: Settings,
        state: MetadataImage,
        exchange: RateExchange,
        sampler: KeySampler,
        clock: Clock,
        scheduler: Scheduler,
        processor_s: Callable[[], float],
    ) -> None:
        """`partitions` is iterated at the end of every window. `processor_s` returns the processor time that this
        broker has used."""
        self.window_ms = settings.hot_partition_window_ms
        self.thresholds = Thresholds(
            settings.hot_partition_records_per_second_min, settings.hot_partition_percent_min / 100
        )
        self.sampler = sampler
        self.load = BrokerLoad(settings.node_id, 0.0, 0.0)
        """The load of this broker in the last window."""
        self._partitions = partitions
        self._state = state
        self._exchange = exchange
        self._clock = clock
        self._scheduler = scheduler
        self._processor_s = processor_s
        self._detector: HotPartitionDetector[Partition] = HotPartitionDetector()
        self._seen: dict[Partition, _Seen] = {}
        self._measured_at = clock.monotonic()
        self._used_s = processor_s()
        self._rates: dict[UUID, dict[Partition, float]] = {}
        """By topic id, the rates of the partitions that took in anything in the last window, in records per second."""
        self._hot: dict[Partition, HotPartition] = {}
        self._window_count = 0
        self._work: Timer | None = None

    def start(self) -> None:
        """Start the windows, unless `hot_partition_window_ms` is 0."""
        if self.window_ms:
            self._work = self._scheduler.spawn(self._run(), name="measure rates of partitions")

    def stop(self) -> None:
        """Stop the windows, and the sampling of keys."""
        if self._work is not None:
            self._work.cancel()
            self._work = None
        self.sampler.stop()

    @property
    def hot(self) -> Collection[HotPartition]:
        """The partitions that are hot now."""
        return self._hot.values()

    def is_hot(self, partition: Partition) -> bool:
        """Whether a partition that this broker leads is hot."""
        return partition in self._hot

    def rates_for_others(self, partitions: Iterable[Partition]) -> Sequence[float]:
        """Return, for another broker, the rates of those of `partitions` that this broker leads and that take in
        anything, in records per second: in the last window or, if that is higher, in the one that has not ended. The
        windows of brokers are not aligned, and what the other one has counted may be in either of these."""
        window_s = self.window_ms / 1000
        found = []
        for partition in partitions:
            seen = self._seen.get(partition)
            if seen is None or not partition.is_leader:
                continue
            rate = self._rates.get(partition.topic_id, {}).get(partition, 0.0)
            if partition.leader_epoch == seen.leader_epoch and window_s:
                rate = max(rate, (partition.log.end_offset - seen.end_offset) / window_s)
            if rate:
                found.append(rate)
        return found

    async def _run(self) -> None:
        while True:
            await self._scheduler.sleep(self.window_ms)
            await self.end_window()

    async def end_window(self) -> None:
        """Measure the rates of a window, and find the partitions that are hot."""
        await self._measure()
        await self._assess()
        self._window_count += 1
        if self._window_count % WINDOWS == 0:
            self.sampler.rotate()
        self.sampler.follow(each.partition for each in self._hot.values())

    async def _measure(self) -> None:
        now, used_s = self._clock.monotonic(), self._processor_s()
        elapsed_s = max(now - self._measured_at, 0.001)
        before = self._seen
        seen: dict[Partition, _Seen] = {}
        rates: dict[UUID, dict[Partition, float]] = {}
        intake = 0.0
        turns = ItemTurns(self._scheduler, Work.HOT_PARTITIONS)
        for partition in tuple(self._partitions):
            if turns.is_over():
                turns.end()
                await self._scheduler.sleep(SLICE_PAUSE_MS)
                turns.begin()
            if not partition.is_leader or partition.internal or partition.closed:
                continue
            end_offset, epoch, known = partition.log.end_offset, partition.leader_epoch, before.get(partition)
            if known is None or known.leader_epoch != epoch:
                known = _Seen(end_offset, epoch, now)
            elif end_offset != known.end_offset:
                rate = max(0, end_offset - known.end_offset) / elapsed_s
                of_topic = rates.get(partition.topic_id)
                if of_topic is None:
                    of_topic = rates[partition.topic_id] = {}
                of_topic[partition] = rate
                intake += rate
                known = _Seen(end_offset, epoch, known.led_since)
            seen[partition] = known
        turns.end()
        self._seen, self._rates = seen, rates
        self.load = self.load._replace(rate=intake, busy=max(0.0, used_s - self._used_s) / elapsed_s)
        self._measured_at, self._used_s = now, used_s

    async def _assess(self) -> None:
        detector, before = self._detector, self._detector.flagged
        detector.retain(self._seen.__contains__)
        known = await self._known_rates()
        hot = self._suspects(known)
        unknown = [each for each in (*detector.known, *self._suspects(None)) if each.topic_id not in known]
        detector.add_window(hot, unknown=unknown)
        detector.retain(lambda partition: partition in self._seen and partition.is_leader)
        self._hot = {each: self._described(each, known) for each in detector.flagged}
        self._report(before)

    async def _known_rates(self) -> dict[UUID, list[float]]:
        """Return the rates of all partitions of the topics with a partition that is hot, was hot, or could be."""
        asked = {each.topic_id for each in (*self._suspects(None), *self._detector.known)}
        others = await self._exchange.ask(asked) if asked else {}
        return {
            topic_id: [*self._rates.get(topic_id, {}).values(), *rates] for topic_id, rates in others.items()
        }

    def _suspects(self, known: Mapping[UUID, Sequence[float]] | None) -> list[Partition]:
        """Return the partitions that are hot if `known` are all the rates of their topics; None: those that could be
        hot, whatever the rates of the partitions are that other brokers lead."""
        floor = self.thresholds.floor(self.load.rate)
        found: list[Partition] = []
        for topic_id, rates in self._rates.items():
            topic = self._state.topics_by_id.get(topic_id)
            if topic is None or (known is not None and topic_id not in known):
                continue
            high = [(partition, rate) for partition, rate in rates.items() if rate >= floor]
            if high:
                all_rates = [*rates.values()] if known is None else known[topic_id]
                of_topic = topic_rates(all_rates, len(topic.partitions))
                found += [partition for partition, rate in high if of_topic.skew(rate).is_uneven]
        return found

    def _described(self, partition: Partition, known: Mapping[UUID, Sequence[float]]) -> HotPartition:
        topic_id = partition.topic_id
        topic, before = self._state.topics_by_id.get(topic_id), self._hot.get(partition)
        led_s = self._measured_at - self._seen[partition].led_since
        if before is not None and (topic_id not in known or topic is None):
            return before._replace(led_s=led_s)
        of_topic = topic_rates(known.get(topic_id, ()), 0 if topic is None else len(topic.partitions))
        rate = self._rates.get(topic_id, {}).get(partition, 0.0)
        return HotPartition(partition, of_topic.skew(rate), led_s)

    def _report(self, before: Collection[Partition]) -> None:
        for partition, each in self._hot.items():
            if partition not in before:
                logger.warning(
                    "partition_hot",
                    extra=fields(
                        topic=partition.topic,
                        partition=partition.index,
                        records_per_second=round(each.skew.rate),
                        median=round(each.skew.median),
                    ),
                )
        for partition in before:
            if partition not in self._hot and partition in self._seen:
                known = fields(topic=partition.topic, partition=partition.index)
                logger.info("partition_not_hot_any_more", extra=known)
