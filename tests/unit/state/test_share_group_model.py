"""Share groups: the assignor `simple`, fencing by epochs, and agreement of stored records and state."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mansio.errors import FencedMemberEpoch, MansioError, NonEmptyGroup, UnknownMember
from mansio.state.assignors.simple import assign_simple
from mansio.state.consumer_group.types import ConsumerGroupSettings, Topics
from mansio.state.share_group.group import ShareGroup, ShareHeartbeat
from mansio.wire.internal_records.consumer_group_records import decode_group_record_key
from support.present import present
from support.tiers import examples, repetitions

IDS = {name: name.encode() * 16 for name in "xyz"}
MEMBERS = st.sampled_from(("a", "b", "c", "d"))
NAMES = st.sets(st.sampled_from("xyzq"), max_size=3).map(lambda names: tuple(sorted(names)))
TOPICS = st.frozensets(st.sampled_from(list(IDS.values())))
SETTINGS = ConsumerGroupSettings(100, 10, 3)


@given(
    subscriptions=st.dictionaries(st.text("ab", min_size=1, max_size=5), TOPICS, max_size=12),
    sizes=st.fixed_dictionaries({each: st.integers(0, 9) for each in IDS.values()}),
    data=st.data(),
)  # fmt: skip
def test_simple_leaves_no_member_idle_and_nothing_unread(
    subscriptions: dict, sizes: dict, data: st.DataObject
) -> None:
    every = [(topic, index) for topic, size in sizes.items() for index in range(size)]
    sometimes = st.frozensets(st.sampled_from(every)) if every else st.just(frozenset())
    before = {member: data.draw(sometimes) for member in subscriptions}
    found = assign_simple(subscriptions, sizes, before)
    check(found, subscriptions, every)
    alike = dict.fromkeys(subscriptions, frozenset(IDS.values()))
    found = assign_simple(alike, sizes, before)
    check(found, alike, every)
    if found and every:
        loads = [len(each) for each in found.values()]
        members = Counter(partition for each in found.values() for partition in each).values()
        assert max(loads) - min(loads) <= 1
        assert max(members) - min(members) <= 1
    assert assign_simple(alike, sizes, found) == found, "nobody moves without a reason"


def check(found: dict, subscriptions: dict, every: list) -> None:
    assert found.keys() == subscriptions.keys()
    read = {partition for each in found.values() for partition in each}
    assert read == {each for each in every if any(each[0] in topics for topics in subscriptions.values())}
    for member, topics in subscriptions.items():
        assert all(topic in topics for topic, _ in found[member])
        assert found[member] or not any(topic in topics for topic, _ in every)


class ShareGroupModel(RuleBasedStateMachine):
    """`reported`: what each member believes: its epoch and what it fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.group = ShareGroup("g", settings=SETTINGS)
        self.sizes = {"x": 2, "y": 1}
        self.log: dict[bytes, bytes] = {}
        self.reported: dict[str, tuple[int, tuple]] = {}
        self.now, self.epoch = 0.0, 0
        self.grow("x", 2)

    def write(self, records: list) -> None:
        for key, value in records:
            self.log.pop(key, None) if value is None else self.log.update({key: value})
            assert present(decode_group_record_key(key)).group == "g"

    def beat(self, member: str, epoch: int, names: tuple | None, *, lost: bool = False) -> bool:
        before = self.group.members.get(member)
        may_come = (0, -1, *((before.current.epoch, before.current.previous_epoch) if before else ()))
        try:
            answer, records = self.group.heartbeat(
                ShareHeartbeat(member, epoch, None, "c", "h", names), self.topics, self.now
            )
        except MansioError as error:
            known = self.group.members.get(member)
            if isinstance(error, UnknownMember):
                assert known is None
            if isinstance(error, FencedMemberEpoch):
                current = present(known).current
                assert epoch not in (current.epoch, current.previous_epoch)
            return False
        self.write(records)
        assert epoch in may_come, "a member of another epoch is fenced"
        if not lost and answer.member_epoch > 0:
            had = self.reported.get(member, (0, ()))[1]
            self.reported[member] = (
                answer.member_epoch,
                had if answer.assignment is None else answer.assignment,
            )
            assert set(self.reported[member][1]) == self.group.members[member].target, "it knows its target"
        return True

    @rule(member=MEMBERS, names=NAMES, lost=st.booleans())
    def join(self, member: str, names: tuple, lost: bool) -> None:
        if member in self.group.members or len(self.group.members) < SETTINGS.size_max:
            assert self.beat(member, 0, names, lost=lost)
            if lost:
                self.reported.pop(member, None)
        else:
            assert not self.beat(member, 0, names)

    @rule(
        member=MEMBERS, names=st.none() | NAMES, lost=st.booleans(), off=st.sampled_from((0, 0, 0, 1, -1, -2))
    )
    def alive(self, member: str, names: tuple | None, lost: bool, off: int) -> None:
        if member in self.reported:
            alive = self.beat(member, max(self.reported[member][0] + off, 1), names, lost=lost)
            if not alive and off == 0:
                del self.reported[member]

    @rule(member=MEMBERS)
    def leave(self, member: str) -> None:
        there = member in self.group.members
        assert self.beat(member, -1, None) == there
        self.reported.pop(member, None)

    @rule(ms=st.sampled_from((1, 50, 99, 100)))
    def time(self, ms: int) -> None:
        self.now += ms
        overdue = {
            each.member_id for each in self.group.members.values() if each.session_deadline_ms <= self.now
        }
        assert bool(overdue) == (self.group.next_deadline_ms() <= self.now)
        self.write(self.group.tick(self.topics, self.now))
        assert not overdue & self.group.members.keys()

    @rule(name=st.sampled_from("xyz"), size=st.integers(0, 4))
    def grow(self, name: str, size: int) -> None:
        self.sizes[name] = size
        ids = {each: IDS[each] for each, many in self.sizes.items() if many}
        self.topics = Topics(ids, {IDS[each]: self.sizes[each] for each in ids}, {})
        self.write(self.group.handle_topic_change(self.topics, self.now))

    @rule(name=st.sampled_from("xyz"), crash=st.booleans())
    def state_is_deleted(self, name: str, crash: bool) -> None:
        try:
            self.write(self.group.start_state_deletion([IDS[name]]))
        except NonEmptyGroup:
            assert any(IDS[name] == topic for each in self.group.members.values() for topic, _ in each.target)
            return
        if crash:
            self.crash()
        self.write(self.group.finish_state_deletion([IDS[name]]))
        state = self.group.state_partitions
        assert IDS[name] not in {each.topic_id for each in (*state.initialized, *state.deleting)}

    @rule()
    def crash(self) -> None:
        self.group = ShareGroup("g", settings=SETTINGS)
        for key, value in self.log.items():
            self.group.apply(present(decode_group_record_key(key)), value)
        self.group.finish_restore(self.now)
        self.write(self.group.handle_topic_change(self.topics, self.now))

    @rule()
    def delete(self) -> None:
        if self.group.members:
            with pytest.raises(NonEmptyGroup):
                self.group.delete()
            return
        self.write(self.group.delete())
        assert self.log == {}
        self.group, self.epoch, self.reported = ShareGroup("g", settings=SETTINGS), 0, {}

    @invariant()
    def holds(self) -> None:
        group = self.group
        assert dict(group.snapshot()) == self.log
        assert group.group_epoch == group.assignment_epoch >= self.epoch
        self.epoch = group.group_epoch
        has_state = {
            (each.topic_id, index) for each in group.state_partitions.initialized for index in each.partitions
        }
        read = {each for member in group.members.values() for each in member.target}
        assert read <= has_state
        names = {name for member in group.members.values() for name in member.metadata.topic_names}
        assert read == {
            (topic, index)
            for name, topic in self.topics.ids.items()
            for index in range(self.topics.partitions[topic] if name in names else 0)
        }
        for member in group.members.values():
            assert member.current.epoch <= group.group_epoch
            assert member.session_deadline_ms < math.inf
        before = dict(self.log)
        for name, (epoch, _) in list(self.reported.items()):
            known = group.members.get(name)
            if known is not None and epoch == known.current.epoch == group.group_epoch:
                deadline = known.session_deadline_ms
                answer, records = group.heartbeat(ShareHeartbeat(name, epoch), self.topics, self.now)
                assert (records, answer.assignment) == ([], None), "an unchanged heartbeat writes nothing"
                member.session_deadline_ms = deadline
        assert self.log == before


EXAMPLES = examples(20, repetitions(100, 300), 5_000)
ShareGroupModel.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=50)
TestShareGroupModel = ShareGroupModel.TestCase
