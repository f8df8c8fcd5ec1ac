"""Members of a share group in a simulated cluster: they lease, accept, release, reject, redrive, and die.

Whoever leads a partition and who keeps its state are told apart by nothing but the errors; what is promised of
deliveries whatever happens to either is judged by `support.share_history`. A member that dies says nothing: what it has
stays its own until the lease ends, also while leaders move. In the end members accept whatever comes, until nothing of
the topic is open.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import InvalidRecordState, NotLeaderOrFollower
from mansio.state.share_partition.types import ACCEPT, AVAILABLE, REJECT, RELEASE, RENEW
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import acknowledge_records, share_acknowledge, share_fetch
from mansio.wire.apis.share_acknowledge import AckBatch, AckPartition
from mansio.wire.batch.record_batch import iterate_batches
from mansio.wire.batch.record_reader import read_records
from sim import fairness, key_limits, key_order, priorities, workload_clients
from sim.clients import LOOK_AGAIN, TOPIC, Client
from sim.features import feature_of
from sim.key_limits import LimitChanger, LimitChecker, Limits
from sim.key_order import EXTENSIONS_MS, LEASES_MS, Answer, KeyChecker
from support.present import present
from support.share_history import Breach, Place, ShareHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.broker.coordinator.share.partition_leader import SharePartitionLeader
    from sim.world import World

FIRST_SEED: Final = 300_000
"""Histories from this seed on have a share group, too; those before are as they were."""

LONG_LEASES_FIRST_SEED: Final = 400_000
"""From this seed on a lease outlives the session of a broker, disks are slow, and all machines fall together more
often: what was leased and not yet synced is lost while somebody has it."""

GROUP: Final = "crew"
MEMBERS: Final = 3
LOCK_MS: Final = 2000
LONG_LOCK_MS: Final = 9000
SURELY: Final = 0.95
"""A broker's clock goes up to 3 % too fast: its leases last so much of their time at least."""

STATE_PARTITIONS: Final = 2
BACKOFF_MS_MAX: Final = 500
VERSION: Final = 2
TYPES: Final = {"accept": ACCEPT, "release": RELEASE, "reject": REJECT}
SETTINGS: Final = {
    "share.auto.offset.reset": "earliest",
    "share.record.lock.duration.ms": str(LOCK_MS),
    "share.delivery.count.limit": "4",
    "mansio.retry.backoff.ms": "50",
    "mansio.retry.backoff.max.ms": str(BACKOFF_MS_MAX),
}
DEAD_LETTERS: Final = f"dlq.{TOPIC}"


def has_share_group(seed: int) -> bool:
    return seed >= FIRST_SEED and feature_of(seed) is None


def lock_ms_of(world: World) -> int:
    """How long leases last."""
    return LONG_LOCK_MS if LONG_LEASES_FIRST_SEED <= world.seed < key_order.FIRST_SEED else LOCK_MS


def has_order_by_key(seed: int) -> bool:
    return key_order.FIRST_SEED <= seed < priorities.FIRST_SEED


def has_priorities(seed: int) -> bool:
    if not has_share_group(seed) or has_fairness(seed):
        return False
    return seed >= priorities.FIRST_SEED and not (has_limits(seed) and seed % 2)


def has_limits(seed: int) -> bool:
    first = fairness.LIMITED_FIRST_SEED if has_fairness(seed) else key_limits.FIRST_SEED
    return has_share_group(seed) and seed >= first


def has_fairness(seed: int) -> bool:
    return has_share_group(seed) and seed >= fairness.FIRST_SEED


def disk_ms_of(seed: int) -> tuple[float, float]:
    """How long syncs take, until everything heals."""
    return (10.0, 60.0) if has_share_group(seed) and seed >= LONG_LEASES_FIRST_SEED else (0.3, 2.5)


def shares_of_faults(seed: int) -> dict[str, int]:
    """Faults that are drawn more, or less, often than in histories without a share group."""
    return {"power loss of all": 15} if seed >= LONG_LEASES_FIRST_SEED else {}


class Delivery:
    """The group, its members and its judge."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lock_ms = lock_ms_of(world)
        self.history = ShareHistory()
        self.keys = KeyChecker(self.history) if has_order_by_key(world.seed) else None
        self.topic_id = world.brokers()[0].core.state.topics[TOPIC].topic_id
        self.limits = LimitChecker(self.history, self._limits_of) if has_limits(world.seed) else None
        self.ends: dict[int, int] = {}
        self.resting: dict[Place, None] = {}
        self.members = [Sharer(self, number) for number in range(MEMBERS)]
        if self.limits is not None:
            partitions = dict(enumerate(world.brokers()[0].core.state.topics[TOPIC].partitions))
            last = key_limits.LAST_WITH_BACKLOGS if has_fairness(world.seed) else key_limits.LAST
            self.changer = LimitChanger(world, GROUP, self.limits, partitions, last)
        if has_fairness(world.seed):
            self.switcher = Switcher(world)

    def _limits_of(self, partition: int) -> set[Limits]:
        """The limits that the leaders of a partition use now, one for each broker that thinks it is one."""
        place = (self.topic_id.bytes, partition)
        found = [
            broker.core.shares.find_loaded(GROUP, place)
            for broker in self.world.network.brokers.values()
            if broker.ready
        ]
        leaders = [leader for each in found if each is not None for leader in each.leaders]
        settings = [leader.state_machine.settings for leader in leaders]
        return {Limits(each.key_leases_max, each.key_rate, each.key_burst) for each in settings}

    def note(self, method: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """Report to the history; a breach ends the run, also where it is caught."""
        try:
            method(*arguments, **named)
        except Breach as breach:
            self.world.checker.broken(str(breach))

    def reasons(self) -> Iterator[str]:
        """What is open yet."""
        world = self.world
        self.resting = {}
        for index, place in enumerate(world.brokers()[0].core.state.topics[TOPIC].partitions):
            leader = world.network.brokers.get(place.leader)
            if leader is None or not leader.ready:
                continue
            name = f"partition {index}, led by {place.leader},"
            shares = leader.core.shares.find_loaded(GROUP, (self.topic_id.bytes, index))
            if shares is None:
                yield f"{name} is not loaded"
                continue
            rests = {each.key.number: self._rests_by_a_wrong_clock(each) for each in shares.leaders}
            offsets = {place.offset for each in rests.values() for place in each}
            for share_partition in shares.leaders:
                resting = rests[share_partition.key.number]
                if held := offsets if self.limits is not None else {place.offset for place in resting}:
                    resting = resting + self._behind(share_partition, held)
                self.resting.update(dict.fromkeys(resting))
                yield from self._reasons_of(leader, share_partition, name, resting)

    def _reasons_of(
        self, leader: Any, share_partition: SharePartitionLeader, name: str, resting: list[Place]
    ) -> Iterator[str]:
        key = share_partition.key
        end = self.ends[key.partition] = share_partition.partition.end_offset
        counts = share_partition.state_machine.counts(share_partition.now_ms())
        if has_fairness(self.world.seed):  # a leader to which no member came does not know the end of the log
            counts = share_partition.counts()
        index = share_partition.index
        is_read = (share_partition.state_machine.ranges if index is None else index).end >= end
        is_held = (self.keys is not None or self.limits is not None) and bool(resting)
        if counts.lag > len(resting) or counts.archiving or not (is_read or is_held):
            problem = leader.core.dead_letters.last_error_of(share_partition.key)
            start = share_partition.state_machine.ranges.start
            yield f"{name} share partition {key.number} begins at {start} of {end}: {counts} {problem}"

    def _rests_by_a_wrong_clock(self, share_partition: SharePartitionLeader) -> list[Place]:
        """A rest is stored by the wall's time, so a wall that was wrong by a day when it was written, or read, makes
        one that long. What was withheld rests as long as a lease."""
        longest_ms = max(2 * BACKOFF_MS_MAX, self.lock_ms)
        latest_ms, until_ms = self.world.wall_ms() + longest_ms, share_partition.now_ms() + longest_ms
        return [
            Place(share_partition.key.partition, offset)
            for span in share_partition.state_machine.ranges
            if span.state == AVAILABLE
            and span.due_ms >= 0
            and (span.due_ms > latest_ms or span.deadline_ms > until_ms)
            for offset in range(span.first, span.last + 1)
        ]

    def _behind(self, share_partition: SharePartitionLeader, resting: set[int]) -> list[Place]:
        """What is not done and waits for one of the same key that rests, in this share partition or, with limits, in
        another one: what may have been leased counts as leased."""
        if self.keys is None and self.limits is None:
            return []
        ranges, log = share_partition.state_machine.ranges, share_partition.partition.log
        waiting = {
            offset
            for span in ranges
            if span.state == AVAILABLE
            for offset in range(span.first, span.last + 1)
        } | set(range(ranges.end, share_partition.partition.end_offset))
        if (index := share_partition.index) is not None:
            own = index.offsets_of(share_partition.key.number)
            waiting = {offset for offset in waiting if own.count(offset, offset)}
        keys: dict[int, bytes | None] = {
            record.offset: record.key
            for batch in log.batches(log.start_offset)
            for record in read_records(batch, output_bytes_max=1 << 24)
        }
        held = {keys.get(offset) for offset in resting} - {None}
        return [
            Place(share_partition.key.partition, offset)
            for offset in sorted(waiting - resting)
            if keys.get(offset) in held
        ]

    def check_end(self) -> None:
        """All that was there when `reasons` had none is settled: was it, as it has to be?"""
        world, state = self.world, self.world.brokers()[0].core.state
        dead: list[Place] = []
        dead_letters_topic = state.topics.get(DEAD_LETTERS)
        for index in range(len(dead_letters_topic.partitions)) if dead_letters_topic is not None else ():
            log = workload_clients.copies(world, present(dead_letters_topic).topic_id, index)[0].log
            for batch in log.batches(log.start_offset):
                for record in read_records(batch, output_bytes_max=1 << 24):
                    known = dict(record.headers)
                    dead.append(
                        Place(
                            int(known["__dlq.errors.partition"] or 0), int(known["__dlq.errors.offset"] or 0)
                        )
                    )
        self.note(self.history.finish, self.ends, dead, self.resting)
        if self.keys is not None:
            self.note(self.keys.finish, dead)


class Sharer(Client):
    """One member. It works on one partition at a time, by a session with its leader."""

    def __init__(self, delivery: Delivery, number: int) -> None:
        super().__init__(delivery.world, f"sharer {number}")
        self.delivery = delivery
        self.history = delivery.history
        self.faithful = True
        self.lease_ms = -1 if delivery.keys is None else LEASES_MS[number % len(LEASES_MS)]
        self.lock_ms = delivery.lock_ms if self.lease_ms < 0 else self.lease_ms
        self.index = number % 2
        self.share_partitions = 0
        self.epoch = 0
        self.held: dict[Place, float] = {}
        """What it has, and since when."""
        self.redrives = 0
        self.redriving: list[tuple[str, Place]] = []
        self.good_at_ms = 0.0
        self.last_error: object = None
        self._be_born()
        self.run(self._run())

    @property
    def _now_ms(self) -> float:
        return self.world.simulation.now_ms

    def _be_born(self) -> None:
        """The process sends nothing more, not even the end of its connection."""
        self.share_partitions += 1
        self.member = f"{self.name} {self.share_partitions}"
        self.epoch = 0
        self.held = {}
        self._link = None

    async def _run(self) -> None:
        while not self.world.over:
            await self.sleep(self.random.uniform(5, 120))
            if self.random.random() < 0.02 and self._may_die():
                self._be_born()
            if self.random.random() < 0.03:
                self.index = 1 - self.index
                self.leader_epoch = -1
                await self._look_again()
            elif not await self._round():
                await self._look_again()

    def _may_die(self) -> bool:
        """In the end, what dies with a long lease would be waited for again and again."""
        return not self.world.writes_end or self.lock_ms <= LOCK_MS

    async def _look_again(self) -> None:
        await self.find_leader(self.index)
        self.epoch = 0
        await self.sleep(self.random.uniform(10, 100))

    async def _round(self) -> bool:
        """False: it should look who leads."""
        if self.epoch == 0:
            return await self._open()
        if self.redriving or (not self.world.writes_end and self.random.random() < 0.05):
            return await self._redrive()
        if self.delivery.keys is not None and not self.world.writes_end and self.random.random() < 0.1:
            return await self._extend()
        acknowledgements = self._decide()
        if acknowledgements and self.random.random() < 0.4:
            return await self._acknowledge(acknowledgements)
        return await self._fetch(self.random.randint(1, 8), acknowledgements)

    async def _open(self) -> bool:
        """A session of its own; an older one gives up what it had, if it is known there."""
        self.history.gone(self.member, self._now_ms)
        return await self._fetch(0, {})

    def _decide(self) -> dict[str, list[Place]]:
        chosen: dict[str, list[Place]] = defaultdict(list)
        for place, since_ms in list(self.held.items()):
            if place.partition != self.index:
                if self._now_ms - since_ms > self.lock_ms:
                    del self.held[place]
                continue
            if self.world.writes_end:
                kind = "accept"
            elif self.random.random() < 0.3:
                if self._now_ms - since_ms > 2 * self.lock_ms:
                    del self.held[place]
                continue
            else:
                kind = self.random.choices(("accept", "release", "reject"), (75, 15, 10))[0]
            chosen[kind].append(place)
            del self.held[place]
        return chosen

    # What it says, and what it is told

    def _topics(self, acknowledgements: dict[str, list[Place]]) -> list[tuple[bytes, list[AckPartition]]]:
        batches = [
            AckBatch(place.offset, place.offset, bytes([TYPES[kind]]))
            for kind, places in acknowledgements.items()
            for place in places
        ]
        return [(self.delivery.topic_id.bytes, [AckPartition(self.index, sorted(batches))])]

    def _say(self, acknowledgements: dict[str, list[Place]]) -> None:
        for kind, places in acknowledgements.items():
            self.history.acks(self.member, self.index, [each.offset for each in places], kind, self._now_ms)

    def _acknowledged(self, acknowledgements: dict[str, list[Place]], code: int) -> None:
        for kind, places in acknowledgements.items():
            if code == 0:
                self.history.acknowledged(self.index, [each.offset for each in places], kind, self._now_ms)
            elif code == InvalidRecordState.kafka_code:
                self.history.refused += len(places)

    def _went_well(self, code: int | None) -> bool:
        """False: look who leads. A session that is not known any more is begun again."""
        if code == 0:
            self.good_at_ms = self._now_ms
            return True
        self.last_error = "no answer" if code is None else code
        if code is None or code == NotLeaderOrFollower.kafka_code or code in LOOK_AGAIN:
            return False
        if code != InvalidRecordState.kafka_code:
            self.epoch = 0
        return True

    async def _fetch(self, most: int, acknowledgements: dict[str, list[Place]]) -> bool:
        sent_ms = self._now_ms
        self._say(acknowledgements)
        frame = await self.ask(
            lambda number: share_fetch.encode_request(
                VERSION,
                number,
                self.name,
                GROUP,
                self.member,
                self.epoch,
                self._topics(acknowledgements),
                max_wait_ms=self.random.choice((0, 100, 400)),
                min_bytes=1,
                max_bytes=1 << 14,
                max_records=most,
                batch_size=max(most, 1),
                acquire_mode=self.random.choice((0, share_fetch.RECORD_LIMIT)),
                lease_ms=self.lease_ms,
            )
        )
        if frame is None:
            return self._went_well(None)
        answer = share_fetch.decode_response(VERSION, frame)
        if answer.error_code:
            return self._went_well(answer.error_code)
        self.epoch += 1
        code = 0
        for _, parts in answer.topics:
            for part in parts:
                self._acknowledged(acknowledgements, part.acknowledge_error_code)
                code = part.error_code or part.acknowledge_error_code
                if not part.error_code and not self.world.is_misled(self.node_id):
                    self._take(part, sent_ms)
        if code == InvalidRecordState.kafka_code:
            code = 0
        return self._went_well(code)

    def _take(self, part: Any, sent_ms: float) -> None:
        far = None if self._link is None else self._link._far
        self._check_keys(part, sent_ms, lambda: far is None or not far._ended)
        for first, last, count in part.acquired:
            self.delivery.note(
                self.history.given,
                self.member,
                part.index,
                first,
                last,
                count,
                sent_ms=sent_ms,
                got_ms=self._now_ms,
                lock_ms=self.lock_ms * SURELY,
                stands=lambda: far is None or not far._ended,
            )
            for offset in range(first, last + 1):
                self.held[Place(part.index, offset)] = sent_ms

    def _check_keys(self, part: Any, sent_ms: float, stands: Callable[[], bool]) -> None:
        if self.delivery.keys is None and self.delivery.limits is None:
            return
        acquired = {offset for first, last, _ in part.acquired for offset in range(first, last + 1)}
        keys: dict[int, bytes | None] = {}
        records = b"".join(part.records)
        for position, header in iterate_batches(records):
            batch = records[position : position + header.size]
            for record in read_records(batch, output_bytes_max=1 << 20):
                if record.offset in acquired:
                    keys[record.offset] = record.key
        ends_ms = sent_ms + self.lock_ms * SURELY
        answer = Answer(self.member, part.index, keys, sent_ms, self._now_ms, ends_ms, stands)
        if self.delivery.keys is not None:
            self.delivery.note(self.delivery.keys.given, answer)
        if self.delivery.limits is not None:
            self.delivery.note(self.delivery.limits.given, answer)

    async def _extend(self) -> bool:
        """Renew one lease, for a duration of its own. Until that is answered, it has the shorter one."""
        here = [place for place in self.held if place.partition == self.index]
        if not here:
            return True
        place, lease_ms, sent_ms = (
            self.random.choice(here),
            self.random.choice(EXTENSIONS_MS),
            self._now_ms,
        )
        self.history.extends(self.member, place, sent_ms + lease_ms * SURELY)
        batch = acknowledge_records.AcknowledgeBatch(place.offset, place.offset, RENEW, lease_ms, "", -1)
        topics = [(self.delivery.topic_id.bytes, [(place.partition, [batch])])]
        frame = await self.ask(
            lambda number: acknowledge_records.encode_request(number, self.name, GROUP, self.member, topics)
        )
        if frame is None:
            return self._went_well(None)
        answer = acknowledge_records.decode_response(frame)
        code = answer.error_code or next((one.error_code for one in answer.results), 0)
        if code == 0:
            self.history.extended(self.member, place, sent_ms + lease_ms * SURELY)
        return self._went_well(code)

    async def _acknowledge(self, acknowledgements: dict[str, list[Place]]) -> bool:
        self._say(acknowledgements)
        frame = await self.ask(
            lambda number: share_acknowledge.encode_request(
                VERSION, number, self.name, GROUP, self.member, self.epoch, self._topics(acknowledgements)
            )
        )
        if frame is None:
            return self._went_well(None)
        answer = share_acknowledge.decode_response(VERSION, frame)
        if answer.error_code:
            return self._went_well(answer.error_code)
        self.epoch += 1
        code = next((part.error_code for _, parts in answer.topics for part in parts), 0)
        self._acknowledged(acknowledgements, code)
        return self._went_well(code)

    async def _redrive(self) -> bool:
        """One that is known to have died is offered again; whether or not that was answered it is asked once more."""
        if not self.redriving:
            dead = [
                place
                for place, one in self.history.records.items()
                if place.partition == self.index and one.rejected_ms < float("inf")
            ]
            if not dead:
                return True
            self.redrives += 1
            self.redriving = [(f"{self.name} {self.redrives}", self.random.choice(dead))] * 2
        redrive_id, place = self.redriving.pop()
        if place.partition != self.index:
            return True
        self.history.asks_redrive(redrive_id, place)
        answer = await self.call(
            ApiKey.REDRIVE_RECORDS,
            0,
            {
                "redrive_id": redrive_id,
                "group_id": GROUP,
                "topic_id": self.delivery.topic_id,
                "partition_index": place.partition,
                "offsets": [{"first_offset": place.offset, "last_offset": place.offset}],
                "most": 10,
            },
        )
        if answer is None or answer.error_code:
            return self._went_well(None if answer is None else answer.error_code)
        self.delivery.note(self.history.redriven, redrive_id, place, answer.redriven)
        return True


class Settings(Client):
    """Sets what the group goes by, before anything goes wrong."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "share settings")
        self.done = False
        self.run(self._run())

    async def _run(self) -> None:
        settings = {**SETTINGS, "share.record.lock.duration.ms": str(lock_ms_of(self.world))}
        if has_order_by_key(self.world.seed):
            settings["mansio.share.order"] = "key"
        if has_limits(self.world.seed):
            settings |= key_limits.TURNS[0].settings()
        if has_fairness(self.world.seed):
            settings["mansio.share.fair"] = "true"
        changes = [{"name": name, "config_operation": 0, "value": value} for name, value in settings.items()]
        resource = {"resource_type": 32, "resource_name": GROUP, "configs": changes}
        while not self.done:
            answer = await self.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]})
            self.done = answer is not None and answer.responses[0].error_code == 0
            self.elsewhere()


class Switcher(Client):
    """Turns fairness off and on, and takes the keys from the header or from the records, again and again. In the end it
    is on or off."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "switcher")
        self._keeps_header = has_limits(world.seed)  # they are judged by the keys of the records
        self.run(self._run())

    async def _run(self) -> None:
        pause_ms = self.random.choice((700, 2500, 8000))
        while not self.world.writes_end:
            await self.sleep(self.random.uniform(0.2, 1.8) * pause_ms)
            is_fair = self.random.random() < 0.7
            header = self.random.choice(("", "", fairness.HEADER)) if not self._keeps_header else ""
            await self._set({"mansio.share.fair": str(is_fair).lower(), "mansio.share.key.header": header})

    async def _set(self, settings: dict[str, str]) -> None:
        changes: list[dict[str, Any]] = [
            {"name": name, "config_operation": 0 if value else 1, "value": value or None}
            for name, value in settings.items()
        ]
        resource = {"resource_type": 32, "resource_name": GROUP, "configs": changes}
        answer = await self.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]})
        if answer is None or answer.responses[0].error_code:
            self.elsewhere()
