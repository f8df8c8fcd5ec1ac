"""Synthetic loads of one topic with fixed seeds: which partitions are hot is known, because the load is made of rates.

A load has a true rate for each partition; what a window counts varies around it. `truth` applies the definition of a
hot partition to the true rates.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.state.hot_partitions.detector import (
    WINDOWS,
    HotPartitionDetector,
    Thresholds,
    topic_rates,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WINDOW_S: Final = 10.0
KINDS: Final = (
    "uniform",
    "zipf keys 0.5",
    "zipf keys 1.0",
    "zipf keys 1.5",
    "idle partitions",
    "two partitions",
    "three partitions",
    "one hot key",
    "many hot keys",
    "bursts",
)


class Load(NamedTuple):
    """True rates of a topic's partitions in records per second, and the rate of everything else on their broker.
    `bursts`: (window, partition, factor) with other rates for one window, of a
    partition at most two."""

    kind: str
    rates: tuple[float, ...]
    other_rate: float
    bursts: tuple[tuple[int, int, float], ...] = ()

    @property
    def truth(self) -> frozenset[int]:
        """The partitions that are hot, by their true rates."""
        of_topic = topic_rates(self.rates, len(self.rates))
        floor = Thresholds().floor(sum(self.rates) + self.other_rate)
        return frozenset(
            index for index, rate in enumerate(self.rates) if rate >= floor and of_topic.skew(rate).is_uneven
        )


def load(kind: str, random: Random) -> Load:
    """Return a load of a kind."""
    partitions = random.choice((4, 6, 12, 24, 48, 100))
    total = 10 ** random.uniform(2.5, 5.0)
    other_rate = random.choice((0.0, 0.0, 1.0, 10.0)) * total
    if kind in ("two partitions", "three partitions"):
        partitions = 2 if kind == "two partitions" else 3
        share = random.choice((1 / partitions, 0.6, 0.9, 0.97))
        rest = (1 - share) / (partitions - 1)
        return Load(kind, (share * total, *[rest * total] * (partitions - 1)), other_rate)
    if kind.startswith("zipf"):
        exponent = float(kind.split()[-1])
        return Load(kind, _of_keys(random, partitions, total, _zipf(exponent, 2_000)), other_rate)
    even = [total / partitions] * partitions
    if kind == "idle partitions":
        active = random.randrange(1, partitions)
        return Load(kind, (*[total / active] * active, *[0.0] * (partitions - active)), other_rate)
    if kind == "one hot key":
        even[random.randrange(partitions)] += random.choice((1.0, 4.0, 20.0)) * total / partitions
    if kind == "many hot keys":
        for index in random.sample(range(partitions), max(1, partitions // 6)):
            even[index] *= random.choice((2.0, 5.0, 10.0))
    bursts: tuple[tuple[int, int, float], ...] = ()
    if kind == "bursts":
        bursts = tuple(
            (window + more, partition, random.uniform(5, 50))
            for partition in random.sample(range(partitions), 4)
            for window in (random.randrange(18),)
            for more in range(random.choice((1, 2)))
        )
    return Load(kind, tuple(even), other_rate, bursts)


def _zipf(exponent: float, keys: int) -> list[float]:
    weights = [(1 + rank) ** -exponent for rank in range(keys)]
    return [weight / sum(weights) for weight in weights]


def _of_keys(random: Random, partitions: int, total: float, shares: Sequence[float]) -> tuple[float, ...]:
    rates = [0.0] * partitions
    for share in shares:
        rates[random.randrange(partitions)] += share * total
    return tuple(rates)


def observed(
    load: Load, random: Random, *, windows: int = 4 * WINDOWS, noise: float = 0.1
) -> list[frozenset[int]]:
    """Return the partitions that the detector has flagged after each window. The rate of a window deviates from the
    true one as that of a Poisson process, and by `noise` more."""
    detector: HotPartitionDetector[int] = HotPartitionDetector()
    thresholds = Thresholds()
    flagged = []
    for window in range(windows):
        factors = {index: factor for at, index, factor in load.bursts if at == window}
        rates = [
            _counted(rate * factors.get(index, 1.0) * max(0.0, random.gauss(1, noise)), random)
            for index, rate in enumerate(load.rates)
        ]
        of_topic = topic_rates([rate for rate in rates if rate], len(rates))
        floor = thresholds.floor(sum(rates) + load.other_rate)
        detector.add_window(
            [index for index, rate in enumerate(rates) if rate >= floor and of_topic.skew(rate).is_uneven]
        )
        flagged.append(detector.flagged)
    return flagged


def _counted(rate: float, random: Random) -> float:
    mean = rate * WINDOW_S
    return max(0.0, random.gauss(mean, mean**0.5)) / WINDOW_S


class Score(NamedTuple):
    """Numbers of partitions that were flagged at the end of loads and are hot, that are not, and of hot ones that were
    not flagged."""

    right: int = 0
    wrong: int = 0
    missed: int = 0

    @property
    def precision(self) -> float:
        return self.right / (self.right + self.wrong) if self.right + self.wrong else 1.0

    @property
    def recall(self) -> float:
        return self.right / (self.right + self.missed) if self.right + self.missed else 1.0


def score(loads: int, *, noise: float, is_counted: Callable[[Load, int], bool] = lambda *_: True) -> Score:
    """Run so many loads, of all kinds in turn; compare the partitions that are flagged at their end with the truth.
    `is_counted`: which partitions count, by load and index."""
    right = wrong = missed = 0
    for seed in range(loads):
        random = Random(seed)
        made = load(KINDS[seed % len(KINDS)], random)
        flagged = observed(made, random, noise=noise)[-1]
        for index in {*flagged, *made.truth}:
            if not is_counted(made, index):
                continue
            right += index in flagged and index in made.truth
            wrong += index not in made.truth
            missed += index not in flagged
    return Score(right, wrong, missed)


def is_clear(made: Load, index: int) -> bool:
    """Whether a partition is not near a threshold: another rate by a quarter would leave the truth as it is."""
    rates = [*made.rates]
    for factor in (0.75, 1.25):
        changed = made._replace(rates=(*rates[:index], rates[index] * factor, *rates[index + 1 :]))
        if (index in changed.truth) != (index in made.truth):
            return False
    return True


if __name__ == "__main__":
    for noise in (0.0, 0.1, 0.3):
        found = score(1_000, noise=noise)
        clear = score(1_000, noise=noise, is_counted=is_clear)
        print(
            f"noise {noise:.0%}: {found}, precision {found.precision:.3f}, recall {found.recall:.3f};"
            f" clear: {clear}, {clear.precision:.4f}, {clear.recall:.4f}"
        )
