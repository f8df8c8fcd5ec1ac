"""Choice of the remedy for a hot partition, and the plan of leader moves. Pure functions.

In this order, the first that applies is what helps now:

1. `PARALLEL_CONSUMERS`: a group is behind, and the leader is not full. A share group, or processing by key within the
   partition, does more at once; nothing is moved.
2. `MOVE_LEADER`: the leader is full, and the broker of an in-sync replica is not.
3. `GROW_TOPIC`: no key has half of the records: more partitions divide them. Changes the partition of keys, so it is
   never done without the consent of the operator, and not for compacted topics, where the old value of a key would stay
   in its former partition.
4. `ISOLATE_KEY`: one key has half of the records or more. No number of partitions divides it; the application has to:
   with a salt, or a topic of its own. Never done by a program.

If most records have no key, neither 3 nor 4 helps: the producer has chosen the partition (`SPREAD_RECORDS`).

Invariants:
* A leader moves to an in-sync replica only, and no broker gets more than the full one had: `gain` is above `GAIN_MIN`.
* Loads are those after the moves that were planned before, so that two partitions do not move to one idle broker unless
  it has room for both.
* A partition whose leader has changed within the cool-down does not move.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.state.hot_partitions.frequent_keys import KeySample

FULL_SHARE: Final = 0.7
"""Part of one processor core from which on a broker counts as full."""
GAIN_MIN: Final = 0.1
"""Part of the higher load of two brokers by which a move has to lower it."""
COOL_DOWN_S: Final = 600.0
"""Time after a change of its leader in which a partition is not moved."""
BEHIND_S_MIN: Final = 30.0
"""Time in which the partition takes in what a group has not read, from which on the group counts as behind."""
HOT_KEY_SHARE: Final = 0.5
"""Part of the records with which one key makes a partition hot."""
SAMPLED_RECORDS_MIN: Final = 100
SAMPLED_BATCHES_MIN: Final = 5
"""Numbers of sampled records and batches from which on a remedy is chosen by keys. A producer may send the records of a
key in one batch."""


class RemedyKind(StrEnum):
    """What helps against a hot partition."""

    PARALLEL_CONSUMERS = "parallel-consumers"
    """A share group, or processing by key within the partition."""
    MOVE_LEADER = "move-leader"
    """Another replica as leader."""
    GROW_TOPIC = "grow-topic"
    """More partitions; keys get others than before."""
    ISOLATE_KEY = "isolate-key"
    """A salt for the key, or a topic of its own; the application has to do it."""
    SPREAD_RECORDS = "spread-records"
    """Other partitions, chosen by the producer of records without keys."""


class BrokerLoad(NamedTuple):
    """Load of a broker. `rate`: records per second that its clients publish; `busy`: part of one processor core that it
    uses."""

    node_id: int
    rate: float
    busy: float


class LeaderMove(NamedTuple):
    """A leader that moves from `source` to `target`. `busy_before` is the higher load of both brokers now, `busy_after`
    what it will be: the load of a broker is divided among its partitions by their rates."""

    source: int
    target: int
    busy_before: float
    busy_after: float

    @property
    def gain(self) -> float:
        """The part of the higher load that goes."""
        return 1 - self.busy_after / self.busy_before


class HotPartitionFacts(NamedTuple):
    """What is known of a hot partition. `led_s`: for how long its leader has led it, as far as that one knows; `lags`:
    (group, records that it has not read); `sample`: None if it is not known; `replicas`: node ids."""

    leader: int
    rate: float
    led_s: float
    replicas: tuple[int, ...]
    in_sync_replicas: tuple[int, ...]
    partition_count: int
    is_compacted: bool
    lags: tuple[tuple[str, int], ...] = ()
    sample: KeySample | None = None


class Remedy(NamedTuple):
    """A remedy. `group`: the group that is furthest behind; `move`: of `MOVE_LEADER`; `partitions`: the number of
    partitions of the grown topic; `key`: the key that has to be isolated."""

    kind: RemedyKind
    reason: str
    group: str | None = None
    move: LeaderMove | None = None
    partitions: int | None = None
    key: bytes | None = None


def choose_remedies(
    facts: HotPartitionFacts, move: LeaderMove | None, *, is_full: bool
) -> tuple[Remedy, ...]:
    """Return what helps, the first thing first; nothing if the keys are not known, and broker and groups keep up.
    `move`: the planned move of the leader, None if none helps; `is_full`: whether the leader is full."""
    return (
        *_of_consumers(facts, is_full=is_full),
        *_of_leader(move),
        *_of_keys(facts),
    )


def _of_consumers(facts: HotPartitionFacts, *, is_full: bool) -> Iterable[Remedy]:
    behind = [(lag / facts.rate, group) for group, lag in facts.lags if facts.rate]
    if is_full or not behind or max(behind)[0] < BEHIND_S_MIN:
        return
    seconds, group = max(behind)
    yield Remedy(
        RemedyKind.PARALLEL_CONSUMERS,
        f"group {group} is {seconds:.0f} s behind, and the broker is not full: a share group, or processing by key,"
        " does more of the partition at once",
        group=group,
    )


def _of_leader(move: LeaderMove | None) -> Iterable[Remedy]:
    if move is not None:
        yield Remedy(
            RemedyKind.MOVE_LEADER,
            f"broker {move.source} is full: with broker {move.target} as leader the higher load of the two is"
            f" {move.busy_after:.0%} of a core, not {move.busy_before:.0%}",
            move=move,
        )


def _of_keys(facts: HotPartitionFacts) -> Iterable[Remedy]:
    sample = facts.sample
    if sample is None or sample.records < SAMPLED_RECORDS_MIN or sample.batches < SAMPLED_BATCHES_MIN:
        return
    top = sample.keys[0] if sample.keys else None
    if top is not None and sample.share_min(top) >= HOT_KEY_SHARE:
        yield Remedy(
            RemedyKind.ISOLATE_KEY,
            f"one key has {sample.share_min(top):.0%} of the records: no number of partitions divides it; salt it, or"
            " give it a topic of its own",
            key=top.key,
        )
    elif sample.without_key >= HOT_KEY_SHARE * sample.records:
        yield Remedy(
            RemedyKind.SPREAD_RECORDS,
            "most records have no key: the producer has chosen the partition, and can choose others",
        )
    elif sample.share_max(top) < HOT_KEY_SHARE and not facts.is_compacted:
        yield Remedy(
            RemedyKind.GROW_TOPIC,
            f"no key has more than {sample.share_max(top):.0%} of the records: more partitions divide them; keys get"
            " other partitions, and their order across the change is lost",
            partitions=2 * facts.partition_count,
        )


def plan_leader_moves(
    partitions: Sequence[HotPartitionFacts],
    loads: Iterable[BrokerLoad],
    *,
    full_share: float = FULL_SHARE,
    cool_down_s: float = COOL_DOWN_S,
) -> list[LeaderMove | None]:
    """Return a move for each partition, None if none helps. The hottest partition is planned first. A broker that is
    not among `loads`, because it did not answer, gets none."""
    now = {each.node_id: each for each in loads}
    busy = {node_id: each.busy for node_id, each in now.items()}
    moves: list[LeaderMove | None] = [None] * len(partitions)
    for number in sorted(range(len(partitions)), key=lambda number: -partitions[number].rate):
        facts = partitions[number]
        source = now.get(facts.leader)
        if source is None or not source.rate or facts.led_s < cool_down_s:
            continue
        if busy[facts.leader] < full_share:
            continue
        part = min(1.0, facts.rate / source.rate) * source.busy
        targets = [
            node_id
            for node_id in facts.in_sync_replicas
            if node_id != facts.leader and busy.get(node_id, full_share) < full_share
        ]
        if not targets:
            continue
        target = min(targets, key=lambda node_id: (busy[node_id], node_id))
        after = {facts.leader: busy[facts.leader] - part, target: busy[target] + part}
        move = LeaderMove(facts.leader, target, busy[facts.leader], max(after.values()))
        if move.gain >= GAIN_MIN:
            moves[number] = move
            busy.update(after)
    return moves
