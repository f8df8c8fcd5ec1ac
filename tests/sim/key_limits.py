"""Limits by key in simulated histories of a share group: they are set, changed, turned off and on while brokers fail.

* No member gets a record while as many of its key are leased as the limit allows.
* In no interval more deliveries of a key start than rate x time + burst.

Both are judged only while all leaders of a partition are known to use the same limits. Always true: what is not known
for sure is taken in the broker's favour, as by `support.share_history`, whose leases this module uses.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.wire.api_versions import ApiKey
from sim.clients import Client
from support.share_history import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sim.key_order import Answer
    from sim.world import World
    from support.share_history import ShareHistory

FIRST_SEED: Final = 650_000
"""Histories with a share group from this seed on have limits by key; every other one has priorities, too. Of those
with fairness, only some have limits (`fairness.LIMITED_FIRST_SEED`)."""

LOOK_MS: Final = 50.0
"""How often the limits of the leaders are looked at."""

FAST: Final = 1.04
"""A broker's clock goes up to 3 % too fast: it allows so many more deliveries."""


class Limits(NamedTuple):
    """Leased records of a key at once, deliveries of a key per second, and the burst; 0 for no limit."""

    leases: int
    rate: float
    burst: int

    def settings(self) -> dict[str, str]:
        return {
            "mansio.share.key.leases.max": f"{self.leases}",
            "mansio.share.key.rate": f"{self.rate}",
            "mansio.share.key.rate.burst": f"{self.burst}",
        }


TURNS: Final = (
    Limits(2, 8.0, 3),
    Limits(0, 0.0, 1),
    Limits(1, 20.0, 1),
    Limits(3, 0.0, 1),
    Limits(0, 12.0, 2),
)
LAST: Final = Limits(2, 50.0, 5)
"""In the end, so that all records are delivered soon."""

LAST_WITH_BACKLOGS: Final = Limits(8, 400.0, 20)
"""In the end of histories with fairness."""


class LimitChecker:
    """Of one group and one topic. `limits_of`: returns the limits that the leaders of a partition use now."""

    def __init__(self, history: ShareHistory, limits_of: Callable[[int], set[Limits]]) -> None:
        self._history = history
        self._limits_of = limits_of
        self._now: dict[int, Limits | None] = {}
        self._since_ms: dict[int, float] = {}
        self._places: defaultdict[tuple[int, bytes], set[Place]] = defaultdict(set)
        self._starts: defaultdict[tuple[int, bytes], list[float]] = defaultdict(list)
        """When each delivery of a key was asked for, in the order in which they were answered."""
        self.checked_leases = 0
        self.checked_rates = 0

    def look(self, partition: int, now_ms: float) -> None:
        """Look at the limits of a partition. They are unknown while no leader has loaded its state."""
        found = self._limits_of(partition)
        if found == {self._now.get(partition)}:
            return
        self._now[partition] = next(iter(found)) if len(found) == 1 else None
        self._since_ms[partition] = now_ms

    def given(self, answer: Answer) -> None:
        """Before `ShareHistory.given` of the same answer."""
        self.look(answer.partition, answer.got_ms)
        by_key: defaultdict[bytes, list[int]] = defaultdict(list)
        for offset, key in answer.keys.items():
            if key is not None:
                by_key[key].append(offset)
        since_ms = self._since_ms.get(answer.partition, float("inf")) + 2 * LOOK_MS
        limits = self._now.get(answer.partition) if since_ms < answer.sent_ms else None
        for key, offsets in by_key.items():
            place = (answer.partition, key)
            if limits is not None and limits.leases:
                self._check_leases(answer, key, offsets, limits.leases)
            self._starts[place] += [answer.sent_ms] * len(offsets)
            if limits is not None and limits.rate:
                self._starts[place] = [each for each in self._starts[place] if each > since_ms]
                self._check_rate(answer, key, limits)
            self._places[place] |= {Place(answer.partition, offset) for offset in offsets}

    def _check_leases(self, answer: Answer, key: bytes, offsets: list[int], most: int) -> None:
        if not answer.stands() or answer.got_ms >= answer.ends_ms:
            return
        self.checked_leases += 1
        others = [
            (place.offset, lease.member)
            for place in self._places[answer.partition, key]
            if place.offset not in offsets
            for lease in self._history.records[place].leases[-1:]
            if answer.got_ms < lease.ends_ms and lease.stands()
        ]
        if len(others) + len(offsets) > most:
            what = f"{answer.partition}/{sorted(offsets)} of {key.decode()} were given to {answer.member}"
            self._history.broken(f"{what}, limit {most}; leased are {others}")

    def _check_rate(self, answer: Answer, key: bytes, limits: Limits) -> None:
        starts = sorted(self._starts[answer.partition, key])
        for at, start_ms in enumerate(starts):
            self.checked_rates += 1
            allowed = limits.rate * FAST * (answer.got_ms - start_ms) / 1000 + limits.burst + 1e-6
            if len(starts) - at > allowed:
                what = f"{len(starts) - at} deliveries of {key.decode()} in partition {answer.partition}"
                self._history.broken(f"{what} in {answer.got_ms - start_ms:.0f} ms: {limits}")


class LimitChanger(Client):
    """Changes the limits of the group again and again."""

    def __init__(
        self,
        world: World,
        group: str,
        checker: LimitChecker,
        partitions: Mapping[int, object],
        last: Limits = LAST,
    ) -> None:
        super().__init__(world, "limit changer")
        self.faithful = True
        self._group = group
        self._checker = checker
        self._partitions = partitions
        self._last = last
        self.changes = 0
        self.run(self._run())
        self.run(self._look())

    async def _look(self) -> None:
        while not self.world.over:
            for partition in self._partitions:
                self._checker.look(partition, self.world.simulation.now_ms)
            await self.sleep(LOOK_MS)

    async def _run(self) -> None:
        while not self.world.writes_end:
            await self._set(TURNS[self.changes % len(TURNS)])
            self.changes += 1
            until_ms = self.world.simulation.now_ms + self.random.uniform(1_500, 5_000)
            while not self.world.writes_end and self.world.simulation.now_ms < until_ms:
                await self.sleep(LOOK_MS)
        await self._set(self._last)

    async def _set(self, limits: Limits) -> None:
        changes = [
            {"name": name, "config_operation": 0, "value": value} for name, value in limits.settings().items()
        ]
        resource = {"resource_type": 32, "resource_name": self._group, "configs": changes}
        while not self.world.over:
            answer = await self.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]})
            if answer is not None and answer.responses[0].error_code == 0:
                return
            self.elsewhere()
            await self.sleep(self.random.uniform(20, 200))
