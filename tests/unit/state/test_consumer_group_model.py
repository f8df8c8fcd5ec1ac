"""Consumer group (KIP-848) compared with a small model of which member reads which partition.

The model does not know how reconciliation runs. It knows what people rely on: no partition is read by two; epochs only
grow; what the group does next follows from its records alone; who does not let go in time is out; and when everybody
behaves, everybody soon has what the target says. Members are honest, slow, silent or lie; answers get lost; the
coordinator crashes; the group changes between the two protocols, both ways.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mansio.errors import FencedMemberEpoch, MansioError, RebalanceInProgress, StaleMemberEpoch, UnknownMember
from mansio.state.classic_group.group import COMPLETING, PREPARING
from mansio.state.classic_group.types import JoinResponse, Persist, Response, Sync, SyncResponse
from mansio.state.consumer_group.group import ConsumerGroup
from mansio.state.consumer_group.types import (
    STABLE,
    TRANSITIONS,
    ConsumerGroupSettings,
    Heartbeat,
    MemberState,
)
from mansio.wire.internal_records.consumer_group_records import decode_group_record_key
from mansio.wire.internal_records.offset_and_group_records import GroupKey, decode_key
from support.consumer_groups import (
    ASSIGNORS,
    REBALANCE_MS,
    SESSION_MS,
    ClassicClient,
    Codec,
    ModernClient,
    World,
)
from support.tiers import examples, repetitions

if TYPE_CHECKING:
    from mansio.state.classic_group.group import ClassicGroup
    from mansio.state.consumer_group.types import Topics
    from mansio.wire.topic_partition import TopicIdPartition

SETTINGS = ConsumerGroupSettings(SESSION_MS, 5_000, 7)
HASTE_MS = 300
ROUNDS = 3
"""Heartbeats that each member needs after a change: the first is answered with what to revoke, the second acknowledges
that, the third is answered with what others have revoked. Two members that exchange partitions need all three, also in
Kafka's CurrentAssignmentBuilder: the one that acknowledges first is UNRELEASED until its next heartbeat, because the
other one holds its partition until it has acknowledged, too."""
SUBSCRIPTIONS = st.sampled_from(
    [(("a",), None), (("a", "b"), None), (("b", "c"), None), ((), None), (None, "^.*"), (("c",), "^[ab]")]
)


def new_group() -> ConsumerGroup:
    return ConsumerGroup(
        "g", assignors=ASSIGNORS, default_assignor="uniform", settings=SETTINGS, codec=Codec()
    )


def by_name(partitions: frozenset[TopicIdPartition]) -> frozenset[TopicIdPartition]:
    """The ids of the model begin with the names."""
    return frozenset((topic[:4], index) for topic, index in partitions)


def size_of(topics: Topics, name: str) -> tuple[bytes, int] | None:
    """The id of a topic and how many partitions it has, None without it."""
    topic_id = topics.ids.get(name)
    return None if topic_id is None else (topic_id, topics.partitions[topic_id])


class GroupMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World({"a": 3, "b": 2})
        self.group: ConsumerGroup = new_group()
        self.classic: ClassicGroup | None = None
        self.log: dict[bytes, bytes] = {}
        self.now_ms = 0.0
        self.ids = itertools.count()
        self.clients: list[Any] = [
            ModernClient("m"),
            ModernClient("n"),
            ModernClient("o"),
            ModernClient("s", "i1"),
            ClassicClient("e", self.world, cooperative=False),
            ClassicClient("c", self.world, cooperative=True),
            ClassicClient("t", self.world, cooperative=True, instance_id="i2"),
        ]
        self.active = [False] * len(self.clients)  # who lives, and takes part in what is done by all
        self.epochs_seen = (0, 0)
        self.member_epochs: dict[str, int] = {}
        self.pending_since: dict[tuple[str, Any], float] = {}
        self.state_seen = self.group.state
        self.copied = self.group  # built from the records before the last event, and then given it, too

    # ------------------------------------------------------------------ what the coordinator does

    def rebuilt(self) -> ConsumerGroup:
        group = new_group()
        for key, value in self.log.items():
            if (modern := decode_group_record_key(key)) is not None:
                group.apply(modern, value)
        group.finish_restore(self.now_ms)
        return group

    def append(self, records: list[tuple[bytes, bytes | None]]) -> None:
        for key, value in records:
            if value is None:
                self.log.pop(key, None)
            else:
                self.log[key] = value

    def perform(self, call: Any) -> Any:
        """One event. A group that is built from the records does the same with it."""
        outcomes = []
        self.copied = self.rebuilt()
        for group in (self.copied, self.group):
            before = dict(group.snapshot())
            try:
                outcomes.append(call(group))
            except MansioError as error:
                outcomes.append(error)
                assert dict(group.snapshot()) == before, "a refused request has changed something"
        copied, real = outcomes
        if isinstance(real, MansioError):
            assert type(copied) is type(real)
            raise real
        answer, records = real
        assert (copied[0], dict(copied[1])) == (answer, dict(records)), "what is not stored has decided"
        self.append(records)
        self.watch()
        return answer

    def give_back(self) -> None:
        """After the last member of the new protocol has left, the classic group takes over."""
        taken = self.group.to_classic(
            initial_delay_ms=0, size_max=9, topics=self.world.topics, now_ms=self.now_ms, wall_ms=1
        )
        if taken is not None:
            self.classic, records = taken
            assert self.classic.generation > self.epochs_seen[0]
            for member in self.group.members.values():
                self.classic.check_commit(
                    member.member_id, member.metadata.instance_id, member.current.epoch, self.now_ms
                )
                assert member.current.epoch < self.classic.generation
            self.append(records)
            assert [decode_key(key) for key in self.log] == [GroupKey("g")]
            self.group = new_group()
            self.pending_since.clear()
            self.member_epochs.clear()
            self.state_seen = self.group.state

    def take_over(self, request: Heartbeat) -> None:
        """A member of the new protocol joins a classic group."""
        assert self.classic is not None
        group, records, answers = ConsumerGroup.from_classic(
            self.classic,
            assignors=ASSIGNORS,
            default_assignor="uniform",
            settings=SETTINGS,
            codec=Codec(),
            topics=self.world.topics,
            now_ms=self.now_ms,
        )
        assert all(isinstance(each.value, RebalanceInProgress) for each in answers)
        for each in self.classic.members:
            generation = self.classic.generation_of(each)
            group.check_commit(each.member_id, each.instance_id, generation, self.now_ms)
        self.group, self.classic = group, None
        self.append(records)
        self.state_seen = self.group.state

    # ------------------------------------------------------------------ what clients do

    def modern_turn(self, client: ModernClient, *, slow: bool = False, lost: bool = False) -> None:
        request = client.request()
        if self.classic is not None:
            if client.epoch != 0 or (client.instance_id is not None and client.names is None):
                client.reset()
                return
            self.take_over(request)
        try:
            answer = self.perform(lambda group: group.heartbeat(request, self.world.topics, self.now_ms))
        except MansioError as error:
            client.fail(error)
            self.give_back()
            return
        owned_or_revoking = {
            each
            for member in self.group.members.values()
            if member.member_id != request.member_id
            for each in member.target
        }
        awaited = any(self.group.stored.owners.get(each) == request.member_id for each in owned_or_revoking)
        busy = self.group.members[request.member_id].current.state != MemberState.STABLE
        assert answer.heartbeat_interval_ms == (HASTE_MS if awaited or busy else 5_000)
        bare = Heartbeat(request.member_id, answer.member_epoch, request.instance_id)
        again = self.copied.heartbeat(bare, self.world.topics, self.now_ms)
        assert again == (answer._replace(assignment=None), []), (
            "it says nothing new, and yet something changes"
        )
        if lost:
            client.must_say_all = True
        else:
            client.hear(request, answer, slow=slow)

    def classic_turn(self, client: ClassicClient, *, lost: bool = False) -> None:
        if self.classic is not None:
            return
        try:
            if not client.must_join:
                self.group.classic_heartbeat(
                    client.member_id, client.instance_id, client.generation, self.now_ms
                )
                return
            self.classic_join(client, lost=lost)
        except RebalanceInProgress as error:
            client.fail(error)
            if not lost:
                try:
                    self.classic_join(client, lost=False)
                except MansioError as other:
                    client.fail(other)
        except MansioError as error:
            client.fail(error)

    def classic_join(self, client: ClassicClient, *, lost: bool) -> None:
        if not self.group.members:
            return  # an empty group is simply replaced by a classic one: nothing of this machine
        for _ in range(2):
            request, new_id = client.join_request(), f"{client.name}-{next(self.ids)}"
            answer: JoinResponse = self.perform(
                lambda group, request=request, new_id=new_id: group.join(
                    request, new_id, self.world.topics, self.now_ms
                )
            )
            client.member_id = answer.member_id
            if not answer.must_rejoin:
                break
        client.generation = answer.generation
        if lost:
            return
        response: SyncResponse = self.group.sync(client.sync_request(), self.world.topics, self.now_ms)
        client.hear(response.assignment)

    def turn(self, number: int, **how: bool) -> None:
        client = self.clients[number]
        if client.is_classic:
            self.classic_turn(client, lost=how.get("lost", False))
        else:
            self.modern_turn(client, **how)

    # ------------------------------------------------------------------ what can happen

    @initialize(numbers=st.sets(st.integers(0, 6), min_size=2), as_classic=st.booleans())
    def begin(self, numbers: set[int], as_classic: bool) -> None:
        self.start(numbers | {0} if as_classic else numbers)
        if as_classic:
            self.all_of_the_new_protocol_leave()

    @rule(numbers=st.sets(st.integers(0, 6), min_size=1))
    def start(self, numbers: set[int]) -> None:
        for number in sorted(numbers):
            self.active[number] = True
            self.turn(number)

    @rule(number=st.integers(0, 6), slow=st.booleans(), lost=st.sampled_from([False, False, True]))
    def go_on(self, number: int, slow: bool, lost: bool) -> None:
        living = [each for each, active in enumerate(self.active) if active]
        if living:
            self.turn(living[number % len(living)], slow=slow, lost=lost)

    @rule(number=st.integers(0, 3))
    def gives_up(self, number: int) -> None:
        self.clients[number].give_up()

    @rule(number=st.integers(0, 6))
    def dies(self, number: int) -> None:
        """It is killed: it reads nothing from now on, and sends nothing."""
        self.active[number] = False
        self.clients[number].restart()

    @rule(number=st.integers(0, 6))
    def falls_silent(self, number: int) -> None:
        """It goes on reading what it has, until its session ends."""
        self.active[number] = False

    @rule(number=st.integers(0, 6), survives_join_phase=st.booleans())
    def leaves(self, number: int, survives_join_phase: bool = False) -> None:
        client = self.clients[number]
        self.active[number] = False
        if self.classic is not None:
            return
        try:
            if client.is_classic:
                self.perform(
                    lambda group: (
                        None,
                        group.leave(client.member_id, client.instance_id, self.world.topics, self.now_ms),
                    )
                )
            else:
                epoch = -2 if survives_join_phase and client.instance_id is not None else -1
                request = Heartbeat(client.member_id, epoch, client.instance_id)
                self.perform(lambda group: group.heartbeat(request, self.world.topics, self.now_ms))
        except MansioError:
            pass
        client.restart()
        self.give_back()

    @rule()
    def all_of_the_new_protocol_leave(self) -> None:
        for number in range(4):
            self.leaves(number)

    @rule(survives_join_phase=st.booleans(), number=st.sampled_from([3, 6]))
    def static_member_comes_back(self, survives_join_phase: bool, number: int) -> None:
        """Under another member id; its place is free only if it has announced that, or was a classic member's."""
        if survives_join_phase:
            self.leaves(number, survives_join_phase)
        else:
            self.dies(number)
        self.start({number})

    @rule(number=st.integers(0, 3))
    def joins_again(self, number: int) -> None:
        """Under the same member id."""
        if self.active[number]:
            self.clients[number].reset()
            self.turn(number)

    @rule(number=st.integers(0, 6), wants=SUBSCRIPTIONS, assignor=st.sampled_from([None, "range"]))
    def subscribes(self, number: int, wants: tuple[Any, Any], assignor: str | None) -> None:
        client = self.clients[number]
        if client.is_classic:
            client.names, client.must_join = wants[0] or ("a",), True
        else:
            client.names, client.regex = wants
            client.names = client.names or ()
            client.assignor = assignor
            client.must_say_all = True

    @rule(number=st.integers(0, 3), back=st.integers(-3, 3), data=st.data())
    def lies(self, number: int, back: int, data: st.DataObject) -> None:
        """It comes with an epoch, or with partitions, that are not its own."""
        members = self.group.members
        liars = [each for each in self.clients[:4] if each.joined and each.member_id in members]
        if not liars or members[liars[number % len(liars)].member_id].is_static_offline:
            return
        client = liars[number % len(liars)]
        member = members[client.member_id]
        everything = sorted(
            (topic_id, index)
            for topic_id, count in self.world.topics.partitions.items()
            for index in range(count)
        )
        owned = frozenset(data.draw(st.sets(st.sampled_from(everything)))) if everything else frozenset()
        current = member.current
        choice = data.draw(st.sampled_from([current.previous_epoch, current.epoch + back]))
        epoch = max(choice, 1)
        if epoch == current.epoch:
            owned |= client.owned  # it may claim more than it has; to claim less would be to give it up
        elif epoch == current.previous_epoch and owned <= current.assigned:
            return
        request = Heartbeat(client.member_id, epoch, client.instance_id, owned=owned)
        try:
            self.perform(lambda group: group.heartbeat(request, self.world.topics, self.now_ms))
        except FencedMemberEpoch:
            assert epoch != current.epoch
        else:
            assert epoch == current.epoch, "it was let in with an epoch, or with partitions, of others"
            client.must_say_all = True

    @rule(number=st.integers(0, 6), back=st.integers(-2, 2))
    def commits(self, number: int, back: int) -> None:
        client = self.clients[number]
        member = self.group.members.get(client.member_id)
        epoch = (0 if member is None else member.current.epoch) + back
        try:
            self.group.check_commit(client.member_id, client.instance_id, epoch, self.now_ms)
        except UnknownMember:
            assert member is None or member.metadata.instance_id != client.instance_id
        except StaleMemberEpoch:
            assert back != 0
        except MansioError:
            assert member is None or back != 0
        else:
            assert back == 0 or not self.group.members

    @rule(name=st.sampled_from(["a", "b", "c"]), count=st.integers(0, 6), notifies=st.booleans())
    def topic_changes(self, name: str, count: int, notifies: bool) -> None:
        """The group hears of it at once, or with the next request."""
        readers = self.readers()
        before = self.group.topics  # it may not have seen those of the world, nor remember any
        epoch = self.group.group_epoch
        self.world.set(name, count) if count or name in self.world.ids else None
        if notifies and self.classic is None:
            self.perform(lambda group: (None, group.handle_topic_change(self.world.topics, self.now_ms)))
            if (
                before is not None
                and name in readers
                and size_of(before, name) != size_of(self.world.topics, name)
            ):
                assert self.group.group_epoch > epoch, "a topic changed, and no new target was computed"

    def readers(self) -> set[str]:
        """Names of topics that some member subscribes to by name."""
        return {each for member in self.group.members.values() for each in member.metadata.topic_names}

    @rule(ms=st.sampled_from([1, 300, 1_000, 3_000, 6_000]))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        self.tick()

    def tick(self) -> None:
        if self.classic is not None:
            return
        before = dict(self.group.members)
        self.append(self.group.tick(self.world.topics, self.now_ms))
        assert self.group.next_deadline_ms() > self.now_ms, "a tick that leaves work behind would spin"
        for client in self.clients:
            if client.member_id in before and client.member_id not in self.group.members:
                client.reset()  # its session is over: it reads nothing any more
        self.watch()
        self.give_back()

    @rule()
    def coordinator_crashes(self) -> None:
        if self.classic is None:
            self.group = self.rebuilt()
            self.pending_since = dict.fromkeys(self.pending_since, self.now_ms)

    @precondition(lambda self: self.classic is not None)
    @rule(eager=st.booleans())
    def classic_group_goes_on(self, eager: bool) -> None:
        """All its clients join and sync, as classic ones do; or it is in the middle of that."""
        classic = self.classic
        assert classic is not None
        living = {}
        for client in self.clients:
            if client.is_classic and client.member_id in classic.members.by_id:
                client.owned = frozenset()
                living[client.member_id] = client
        effects = []
        for member_id, client in living.items():
            effects += classic.join(client.join_request(), ("join", member_id), member_id, self.now_ms)
        if not eager:
            return
        if classic.state is PREPARING:
            self.now_ms = classic.join_phase.deadline_ms
            effects += classic.tick(self.now_ms)
        answers = {each.waiter[1]: each.value for each in effects if isinstance(each, Response)}
        effects = []
        joined = [each for each in answers.values() if isinstance(each, JoinResponse)]
        if len(joined) < len(answers):
            return
        leader = next((each for each in joined if each.members), None)
        everything = [(name, index) for name, count in self.world.counts.items() for index in range(count)]
        if leader is None or leader.generation != classic.generation or classic.state is not COMPLETING:
            return  # somebody's session has ended in the middle of it
        listed = [each.member_id for each in leader.members]
        shares = {
            member_id: Codec().encode_assignment(everything[position :: len(listed)])
            for position, member_id in enumerate(listed)
        }
        for member_id in [each for each in listed if each in living]:  # a static one keeps its place unseen
            sync = Sync(
                member_id,
                living[member_id].instance_id,
                classic.generation,
                shares if member_id == leader.leader else {},
            )
            effects += classic.sync(sync, ("sync", member_id), self.now_ms)
        for persist in [each for each in effects if isinstance(each, Persist)]:
            effects += classic.handle_persisted(persist.token, None, self.now_ms)
        for each in effects:
            if isinstance(each, Response) and isinstance(each.value, SyncResponse):
                client = living[each.waiter[1]]
                client.generation = classic.generation
                client.owned = frozenset()
                client.hear(each.value.assignment)

    @rule(change=st.sampled_from(["join", "leave", "grow", "none"]), number=st.integers(0, 6))
    def calm(self, change: str, number: int) -> None:
        """Everybody behaves until the group is stable; then one thing changes, and it is stable again after few
        rounds."""
        if self.classic is not None:
            return
        for _ in range(20):
            self.round()
            if self.is_classic():
                return
            if self.is_reconciled() and not self.nobodys() and not self.outsiders():
                break
        else:
            if self.is_reconciled() and not self.nobodys():
                return  # who is not in it has no protocol that is on record of the others: they have to join again
            pytest.fail(f"the group does not come to rest: {self.described()}")
        if not self.group.members and any(self.active):
            return  # its classic clients are about to come, all at once, and some of them under ids that are no more
        if change == "join" and not self.active[number]:
            self.clients[number].restart()
            self.start({number})  # before the rounds: in each of them lower numbers take their turn first
        elif change == "leave" and self.active[number]:
            self.leaves(number)
        elif change == "grow":
            self.topic_changes("a", self.world.counts.get("a", 0) + 2, notifies=True)
        for _ in range(ROUNDS):
            if self.is_classic():
                return
            self.round(pass_ms=100)
        if self.classic is None:
            assert self.is_reconciled(), f"three honest rounds were not enough: {self.described()}"

    def nobodys(self) -> set[str]:
        """Members whose client was killed, is silent, or away."""
        living = {each.member_id for each, active in zip(self.clients, self.active, strict=True) if active}
        return set(self.group.members) - living

    def outsiders(self) -> set[str]:
        """Clients that are no members, but about to join."""
        living = {each.member_id for each, active in zip(self.clients, self.active, strict=True) if active}
        return living - set(self.group.members) if self.group.members else set()

    def is_classic(self) -> bool:
        return self.classic is not None

    def round(self, pass_ms: int = 1_000) -> None:
        for number, client in enumerate(self.clients):
            if self.active[number] and self.classic is None:
                if not client.is_classic:
                    client.give_up()
                self.turn(number)
        self.now_ms += pass_ms
        self.tick()

    def is_reconciled(self) -> bool:
        if not self.group.members:
            return True
        for number, client in enumerate(self.clients):
            member = self.group.members.get(client.member_id)
            if not self.active[number] or member is None:
                continue
            owned, target = client.owned, member.target
            if client.is_classic:  # it is told of topics by their names, also of one that was made anew
                owned, target = by_name(owned), by_name(target)
            if owned != target:
                return False
        return self.group.state is STABLE

    def described(self) -> str:
        lines = [f"{self.group.state} {self.group.group_epoch} {self.group.assignment_epoch}"]
        lines += [
            f"{each.member_id}: {each.current} -> {sorted(each.target)}"
            for each in self.group.members.values()
        ]
        lines += [f"{each.name}: {sorted(each.owned)}" for each in self.clients]
        return "\n".join(lines)

    # ------------------------------------------------------------------ what must hold

    def watch(self) -> None:
        """Epochs only grow, states follow each other as drawn, and no member keeps a partition beyond its time."""
        epochs = (self.group.group_epoch, self.group.assignment_epoch)
        assert epochs[0] >= self.epochs_seen[0]
        assert epochs[1] >= self.epochs_seen[1] or self.epochs_seen[1] > epochs[0]
        self.epochs_seen = epochs
        pending = {}
        for member in self.group.members.values():
            epoch = member.current.epoch
            assert epoch >= self.member_epochs.get(member.member_id, 0) or member.is_static_offline
            self.member_epochs[member.member_id] = max(epoch, 0)
            assert epoch <= self.group.assignment_epoch
            for each in member.current.pending:
                key = (member.member_id, each)
                pending[key] = self.pending_since.get(key, self.now_ms)
                assert self.now_ms - pending[key] <= REBALANCE_MS, "a partition is kept for ever"
        self.pending_since = pending
        state = self.group.state
        assert state is self.state_seen or state in TRANSITIONS[self.state_seen]
        self.state_seen = state

    @invariant()
    def no_partition_is_read_by_two(self) -> None:
        readers: dict[Any, str] = {}
        for client in self.clients:
            for each in client.owned:
                other = readers.setdefault(each, client.name)
                assert other == client.name, f"{each} is read by {other} and {client.name}"

    @invariant()
    def no_member_holds_what_another_holds(self) -> None:
        owned_or_revoking = [
            each for member in self.group.members.values() for each in member.owned_or_revoking()
        ]
        assert len(owned_or_revoking) == len(set(owned_or_revoking))
        assert set(owned_or_revoking) == set(self.group.stored.owners)
        targets = [each for member in self.group.members.values() for each in member.target]
        assert len(targets) == len(set(targets))

    @invariant()
    def memory_is_what_the_records_say(self) -> None:
        if self.classic is None:
            assert dict(self.group.snapshot()) == self.log
            assert not self.group.members or self.group.next_deadline_ms() < math.inf


TestConsumerGroup = GroupMachine.TestCase
TestConsumerGroup.settings = settings(
    max_examples=examples(10, repetitions(100, 300), 3_000), stateful_step_count=50
)
pytest.mark.timeout(600)(TestConsumerGroup)


def test_a_join_that_makes_two_members_exchange_partitions_needs_three_heartbeats_of_each() -> None:
    """The classic member takes its turn after both others, which still have their old epochs then."""
    machine = GroupMachine()
    machine.world.set("b", 3)
    machine.clients[6].names = ("a",)
    machine.start({1, 2})
    machine.calm("join", 6)
    assert {each.member_id for each in machine.group.members.values()} == {"n0", "o0", "t-0"}


def test_what_a_classic_member_reads_of_a_deleted_topic_is_revoked_after_the_group_changed_hands_twice() -> (
    None
):
    """The classic group that took over cannot name a partition of a deleted topic any more, and its members have not
    joined it when a member of the new protocol comes. The cooperative client knows nothing of the deletion."""
    machine = GroupMachine()
    machine.start({0, 6})
    for _ in range(3):
        machine.round()
    for name in ("a", "b"):  # no partition is left that it would have to join for
        machine.topic_changes(name, 0, notifies=True)
    machine.leaves(0)
    assert machine.classic is not None
    assert machine.clients[6].owned
    machine.start({1})
    machine.calm("none", 0)
    assert machine.clients[6].member_id in machine.group.members
    assert machine.is_reconciled()
