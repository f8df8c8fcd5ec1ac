"""Classic group compared with a small model of what its members received.

The model does not know how rebalances run. It knows what a client may rely on: within a generation everyone has the
same leader and protocol, only the leader is shown the members, assignments are the leader's and are given out only
when stored, older generations are fenced, every request is answered once, and time alone ends every wait.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mansio.errors import IllegalGeneration, MansioError, RebalanceInProgress, StorageError
from mansio.state.classic_group.group import (
    COMPLETING,
    EMPTY,
    NEW_MEMBER_JOIN_TIMEOUT_MS,
    PREPARING,
    STABLE,
    ClassicGroup,
)
from mansio.state.classic_group.types import (
    Effect,
    Join,
    JoinResponse,
    Persist,
    Protocol,
    Response,
    Sync,
    SyncResponse,
)
from support.tiers import examples

SESSION_MS = 10_000
REBALANCE_MS = 30_000
SIZE_MAX = 4
NUMBERS = st.integers(0, 5)
PROTOCOLS = {
    "range": (Protocol("range", b"r"),),
    "both": (Protocol("sticky", b"s"), Protocol("range", b"r")),
}


class Client:
    """What one consumer process believes."""

    def __init__(self, instance_id: str | None, protocols: str) -> None:
        self.instance_id = instance_id
        self.protocols = PROTOCOLS[protocols]
        self.member_id = ""
        self.generation = -1
        self.answer: JoinResponse | None = None
        self.stage = "heartbeat"


class GroupMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.group = ClassicGroup("g", initial_delay_ms=200, size_max=SIZE_MAX)
        self.now_ms = 0.0
        self.clients = [
            Client(None, "both"),
            Client(None, "range"),
            Client(None, "both"),
            Client("i1", "both"),
        ]
        self.clients += [Client("i1", "range"), Client(None, "both")]
        self.ids = itertools.count()
        self.waiting: dict[int, tuple[str, Client]] = {}
        self.writes: list[Persist] = []
        self.stored: dict[int, dict[str, bytes]] = {}  # generation -> assignments that are committed
        self.facts: dict[int, tuple[str | None, str]] = {}  # generation -> protocol, leader
        self.generation_seen = 0

    # What the coordinator does

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Persist):
                self.writes.append(effect)
                continue
            assert isinstance(effect, Response)
            kind, client = self.waiting.pop(effect.waiter)  # a second answer is a KeyError
            if isinstance(effect.value, JoinResponse):
                assert kind == "join"
                self.joined(client, effect.value)
            elif isinstance(effect.value, SyncResponse):
                assert kind == "sync"
                self.synced(client, effect.value)

    def joined(self, client: Client, answer: JoinResponse) -> None:
        client.member_id = answer.member_id
        if answer.must_rejoin:
            assert client.instance_id is None
            return
        client.generation = answer.generation
        client.answer = answer
        client.stage = "sync"
        if answer.leader not in self.group.members.by_id:
            return  # an old client of a static member that came back: it is told the id that was
        fact = self.facts.setdefault(answer.generation, (answer.protocol, answer.leader))
        assert fact[0] == answer.protocol
        if answer.member_id == answer.leader:
            assert {each.member_id for each in answer.members} == set(self.group.members.by_id)
        else:
            assert answer.members == ()

    def synced(self, client: Client, answer: SyncResponse) -> None:
        assert client.generation in self.stored, "an assignment was given out before it was stored"
        static = client.instance_id is not None
        if not static:  # a static member's assignment moves on to its next member id
            assert answer.assignment == self.stored[client.generation].get(client.member_id, b"")

    def attempt(self, kind: str, client: Client, call: Any) -> None:
        waiter = next(self.ids)
        self.waiting[waiter] = (kind, client)
        before = (self.group.state, self.group.generation, len(self.group.members))
        try:
            effects = call(waiter)
        except MansioError:
            del self.waiting[waiter]
            assert before == (self.group.state, self.group.generation, len(self.group.members))
            return
        self.perform(effects)

    # What can happen

    @rule(number=NUMBERS)
    def go_on(self, number: int) -> None:
        """What a well-behaved client does next: join, sync, or a heartbeat; it does what it is asked."""
        client = self.clients[number]
        if any(each is client for _, each in self.waiting.values()):
            return
        if client.stage == "sync":
            self.sync(number)
            return
        try:
            self.group.heartbeat(client.member_id, client.instance_id, client.generation, self.now_ms)
        except RebalanceInProgress:
            pass
        except MansioError:
            client.member_id = ""
        else:
            return
        self.join(number, recent=number != 1, lost=False)

    @rule(numbers=st.sets(NUMBERS, min_size=1), rounds=st.integers(1, 4))
    def calm(self, numbers: set[int], rounds: int) -> None:
        """Some clients behave for a while. Without this, chaos would keep the group from ever being stable."""
        for _ in range(rounds):
            for number in sorted(numbers):
                self.go_on(number)
            self.time_passes(200)
            if self.writes:
                self.end_write(None)

    @rule(number=NUMBERS, protocols=st.sampled_from(list(PROTOCOLS)))
    def restart_client(self, number: int, protocols: str) -> None:
        self.clients[number] = Client(self.clients[number].instance_id, protocols)

    @rule(number=NUMBERS, recent=st.booleans(), lost=st.sampled_from([False, False, False, True]))
    def join(self, number: int, recent: bool, lost: bool) -> None:
        """`lost`: the answer never reaches the client, which goes on with what it knows."""
        client = self.clients[number]
        request = Join(
            client.member_id,
            client.instance_id,
            "c",
            "/h",
            SESSION_MS,
            REBALANCE_MS,
            "consumer",
            client.protocols,
            requires_member_id=recent,
            can_skip_assignment=recent,
        )
        new_id = f"m{next(self.ids)}"
        heir = copy.copy(client) if lost else client
        self.attempt("join", heir, lambda waiter: self.group.join(request, waiter, new_id, self.now_ms))

    @rule(number=NUMBERS)
    def sync(self, number: int) -> None:
        client = self.clients[number]
        client.stage = "heartbeat"
        assignments = {}
        if client.answer is not None and client.answer.member_id == client.answer.leader:
            listed = client.answer.members
            assignments = {each.member_id: b"%d/%d" % (client.generation, n) for n, each in enumerate(listed)}
        request = Sync(client.member_id, client.instance_id, client.generation, assignments, "consumer")
        self.attempt("sync", client, lambda waiter: self.group.sync(request, waiter, self.now_ms))

    @rule(number=NUMBERS)
    def heartbeat_and_commit(self, number: int) -> None:
        client = self.clients[number]
        member = self.group.members.by_id.get(client.member_id)
        mine = member is not None and member.instance_id == client.instance_id
        current = mine and client.generation == self.group.generation
        for call in (self.group.heartbeat, self.group.check_commit):
            try:
                call(client.member_id, client.instance_id, client.generation, self.now_ms)
            except RebalanceInProgress:
                assert current
                assert self.group.state in (PREPARING, COMPLETING)
            except IllegalGeneration:
                assert mine
                assert not current
            except MansioError:
                assert not mine
            else:
                fenced_off = call == self.group.check_commit and self.group.state is EMPTY
                assert current or (fenced_off and client.generation == -1)

    @rule(number=NUMBERS, forget=st.booleans())
    def leave(self, number: int, forget: bool) -> None:
        client = self.clients[number]
        try:
            effects = self.group.leave(client.member_id, client.instance_id, self.now_ms)
        except MansioError:
            return
        finally:
            if forget:
                client.member_id = ""
        self.perform(effects)

    @rule(ms=st.sampled_from([1, 200, 200, 5_000, 10_000, 30_000]))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        self.perform(self.group.tick(self.now_ms))
        assert self.group.next_deadline_ms() > self.now_ms, "a tick that leaves work behind would spin"

    @rule(fails=st.sampled_from([False, False, False, True]))
    def write_ends(self, fails: bool) -> None:
        if self.writes:
            self.end_write(StorageError() if fails else None)

    def end_write(self, error: StorageError | None) -> None:
        write = self.writes.pop(0)
        if error is None:
            stored = {each.member_id: each.assignment for each in write.metadata.members}
            self.stored.setdefault(write.metadata.generation, {}).update(stored)
        self.perform(self.group.handle_persisted(write.token, error, self.now_ms))

    @rule()
    def coordinator_restarts(self) -> None:
        """Only what is stored survives; parked requests are lost with their connections."""
        stable = self.group.state is STABLE and not self.writes
        if not stable:
            return
        before = {each.member_id: each.assignment for each in self.group.members}
        write = self.group._persist(before)
        self.group = ClassicGroup("g", initial_delay_ms=200, size_max=SIZE_MAX)
        self.group.restore(write.metadata, self.now_ms)
        self.waiting.clear()
        assert {each.member_id: each.assignment for each in self.group.members} == before
        for member in self.group.members:
            self.group.heartbeat(member.member_id, member.instance_id, write.metadata.generation, self.now_ms)

    # What must hold

    @invariant()
    def generations_only_grow(self) -> None:
        assert self.group.generation >= self.generation_seen
        self.generation_seen = self.group.generation

    @invariant()
    def the_roster_agrees_with_itself(self) -> None:
        members = self.group.members
        assert members.joined_count == sum(each.join_waiter is not None for each in members)
        assert (members.surviving_count() if self.group.state is PREPARING else len(members)) <= SIZE_MAX
        assert (members.leader in members.by_id) if len(members) else members.leader is None
        assert members.static_members == {
            each.instance_id: each.member_id for each in members if each.instance_id
        }
        assert (self.group.state is EMPTY) <= (len(members) == 0)

    @invariant()
    def every_waiting_member_is_known_to_the_group(self) -> None:
        parked = {each.join_waiter for each in self.group.members} | {
            each.sync_waiter for each in self.group.members
        }
        assert set(self.waiting) == parked - {None}

    def teardown(self) -> None:
        """Time, and writes that end, answer everyone; then silence empties the group."""
        for _ in range(200):
            while self.writes:
                self.end_write(None)
            due_ms = self.group.next_deadline_ms()
            if due_ms == math.inf:
                break
            assert due_ms <= self.now_ms + NEW_MEMBER_JOIN_TIMEOUT_MS
            self.now_ms = due_ms
            self.perform(self.group.tick(self.now_ms))
        assert self.group.next_deadline_ms() == math.inf
        assert not self.waiting
        assert self.group.state is EMPTY


TestClassicGroup = GroupMachine.TestCase
TestClassicGroup.settings = settings(
    max_examples=examples(20, 100, 5_000), stateful_step_count=40, deadline=None
)
