"""The state of share groups in a cluster: asked for and written over the network, wherever it is led now."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.broker.coordinator.share.state_messages import (
    VERSIONS,
    RequestSender,
    StateRequestEntry,
    StateResult,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from mansio.broker.coordinator.share.state_store import WriteToken
from mansio.broker.routing.routes import partition_for, share_partition_key
from mansio.errors import (
    CoordinatorNotAvailable,
    FencedLeaderEpoch,
    FencedStateEpoch,
    MansioError,
    NotCoordinator,
    WireError,
)
from mansio.state.broker_handshake import BrokerIdentity
from mansio.state.share_partition.types import (
    ACKNOWLEDGED,
    ACQUIRED,
    BACKLOG_QUEUES,
    LoadedState,
    ShareKey,
    ShareSummary,
    StateBatch,
    Update,
)
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from mansio.wire.headers import read_request_header
from support.share_state_cluster import LOCK_MS, PARTITIONS, StateCluster
from support.share_state_fixtures import begun, key_of, leased
from support.tiers import examples
from unit.state.test_share_state_records_properties import ANY_UPDATES, INT32, INT64, KEYS


def keys_in(index: int, count: int = 1) -> list[ShareKey]:
    found = (key_of(f"g{n}") for n in range(1000))
    return [key for key in found if partition_for(share_partition_key(key), PARTITIONS) == index][:count]


def begin(cluster: StateCluster, node_id: int, key: ShareKey, leader_epoch: int = 0) -> None:
    persister = cluster.nodes[node_id].persister
    assert cluster.run(persister.read(key, leader_epoch)) is None
    cluster.run(persister.write(key, 0, leader_epoch, begun()))


# Messages

SENDERS = st.builds(RequestSender, INT32, INT64)
QUESTIONS = st.builds(
    StateRequestEntry,
    KEYS,
    INT32,
    INT32,
    INT64,
    st.builds(WriteToken, INT64, INT32),
    ANY_UPDATES.map(lambda each: each),
)
APIS = st.sampled_from(sorted(VERSIONS))


def asked(api_key: int, state_request: StateRequestEntry) -> StateRequestEntry:
    """What of a question is in a request of this kind."""
    plain = StateRequestEntry(state_request.key)
    if api_key == ApiKey.WRITE_SHARE_GROUP_STATE:
        return state_request._replace(
            start_offset=state_request.update.start_offset if state_request.update else 0
        )
    if api_key == ApiKey.INITIALIZE_SHARE_GROUP_STATE:
        return plain._replace(state_epoch=state_request.state_epoch, start_offset=state_request.start_offset)
    if api_key == ApiKey.DELETE_SHARE_GROUP_STATE:
        return plain
    return plain._replace(leader_epoch=state_request.leader_epoch)


@settings(max_examples=examples(20, 60))
@given(APIS, SENDERS, st.lists(QUESTIONS, min_size=1, max_size=3), st.booleans())
def test_requests_come_back_as_kafkas_schema_reads_them_too_and_every_cut_is_seen(
    api_key: int, sender: RequestSender, state_requests: list[StateRequestEntry], durable: bool
) -> None:
    state_requests = [
        each._replace(update=each.update._replace(durable=durable) if each.update else None)
        for each in state_requests
    ]
    frame = encode_request(api_key, sender, state_requests, "c")[4:]
    body = frame[read_request_header(frame).body_position :]
    assert decode_request(api_key, body) == (sender, [asked(api_key, each) for each in state_requests])
    read = messages.decode_request(api_key, VERSIONS[ApiKey(api_key)], body)
    assert read.group_id == state_requests[0].key.group
    assert [topic.partitions[0].partition for topic in read.topics] == [
        each.key.partition for each in state_requests
    ]
    if api_key == ApiKey.WRITE_SHARE_GROUP_STATE:
        first = state_requests[0].update
        assert first is not None
        batches = read.topics[0].partitions[0].state_batches
        assert [each.first_offset for each in batches] == [each.first for each in first.changes]
        assert read.topics[0].partitions[0].delivery_complete_count == first.done_count
    for length in range(0, len(body), 3):
        with pytest.raises(WireError):
            decode_request(api_key, body[:length])


STATES = st.builds(
    LoadedState,
    INT32,
    INT32,
    INT32,
    INT64,
    INT64,
    INT32,
    ANY_UPDATES.map(lambda each: each.changes),
    ANY_UPDATES.map(lambda each: each.dead_ranges or ()),
    ANY_UPDATES.map(lambda each: each.redrives or ()),
    ANY_UPDATES.map(lambda each: each.producer),
    st.booleans(),
    INT32,
    ANY_UPDATES.map(lambda each: each.isolations or ()),
)
ANSWERS = st.builds(
    StateResult,
    st.just(0),
    st.none() | st.text(max_size=5),
    INT64,
    st.none() | STATES,
    st.none()
    | st.builds(
        ShareSummary,
        INT32,
        INT32,
        INT64,
        INT32,
        st.booleans(),
        st.sets(st.sampled_from(BACKLOG_QUEUES)).map(tuple),
    ),
)


@settings(max_examples=examples(20, 60))
@given(APIS, KEYS, st.lists(ANSWERS, min_size=1, max_size=3))
def test_answers_come_back_as_kafkas_schema_reads_them_too_and_every_cut_is_seen(
    api_key: int, key: ShareKey, answers: list[StateResult]
) -> None:
    frame = encode_response(api_key, 5, [StateRequestEntry(key)] * len(answers), answers)[4:]
    expected = []
    for each in answers:
        result = StateResult(0, each.message)
        if api_key == ApiKey.READ_SHARE_GROUP_STATE:
            result = result._replace(session=each.session, state=each.state)
        elif api_key == ApiKey.READ_SHARE_GROUP_STATE_SUMMARY:
            result = result._replace(summary=each.summary)
        expected.append(result)
    assert decode_response(api_key, frame) == expected
    body = frame[5:]
    read = messages.decode_response(api_key, VERSIONS[ApiKey(api_key)], body)
    assert len(read.results) == len(answers)
    for length in range(0, len(body), 3):
        with pytest.raises(WireError):
            decode_response(api_key, frame[: 5 + length])


def test_an_error_is_an_answer() -> None:
    for api_key in VERSIONS:
        frame = encode_response(api_key, 0, [StateRequestEntry(key_of())], [StateResult(16, "elsewhere")])
        assert decode_response(api_key, frame[4:]) == [StateResult(16, "elsewhere")]


@given(APIS, st.binary(max_size=80), st.integers(0, 80))
def test_any_bytes_are_a_message_or_a_wire_error(api_key: int, noise: bytes, at: int) -> None:
    state_request = StateRequestEntry(
        key_of(), write_token=WriteToken(1, 2), update=leased(0, 9, durable=True)
    )
    frame = encode_request(api_key, RequestSender(1, 2), [state_request], "c")[4:]
    body = frame[read_request_header(frame).body_position :]
    answer = encode_response(api_key, 5, [state_request], [StateResult()])[4:]
    for data in (noise, body[:at] + noise + body[at + len(noise) :]):
        with suppress(WireError):
            decode_request(api_key, data)
    for data in (noise, answer[:at] + noise + answer[at + len(noise) :]):
        with suppress(WireError):
            decode_response(api_key, data)


# Near and far


def test_the_first_write_makes_the_topic_and_all_brokers_find_the_state() -> None:
    cluster = StateCluster()
    key = key_of()
    begin(cluster, 1, key)
    assert len(cluster.partitions) == PARTITIONS
    for epoch, node in enumerate(cluster.nodes.values(), start=1):
        state = cluster.run(node.persister.read(key, epoch))
        assert (state.leader_epoch, state.lease_bound, state.is_complete) == (epoch, 100, True)


@pytest.mark.parametrize("index", range(PARTITIONS))
def test_a_state_is_the_same_near_and_far(index: int) -> None:
    cluster = StateCluster()
    key = keys_in(index)[0]
    begin(cluster, 1, key)
    persister = cluster.nodes[1].persister
    cluster.run(persister.write(key, 0, 0, leased(0, 9)))
    cluster.run(persister.write(key, 0, 0, leased(3, 4, durable=True, deliveries=2)))
    state = cluster.run(persister.read(key, 1))
    assert state.changes == (
        StateBatch(0, 2, ACQUIRED, 1, holder="m"),
        StateBatch(3, 4, ACQUIRED, 2, holder="m"),
        StateBatch(5, 9, ACQUIRED, 1, holder="m"),
    )
    assert cluster.run(persister.summary(key)) == ShareSummary(0, 1, 0, 0)
    with pytest.raises(FencedLeaderEpoch):
        cluster.run(persister.read(key, 0))
    cluster.run(persister.initialize(key, 1, 7))
    with pytest.raises(MansioError) as caught:
        cluster.run(persister.write(key, 0, 1, leased(8, 8)))
    assert isinstance(caught.value, FencedStateEpoch | NotCoordinator)
    assert cluster.run(persister.read(key, 1)).start_offset == 7
    cluster.run(persister.delete(key))
    assert cluster.run(persister.read(key, 1)) is None
    assert cluster.run(persister.summary(key)) is None


def test_what_waits_for_a_broker_goes_together_and_in_order() -> None:
    cluster = StateCluster()
    keys = keys_in(2, 20)
    for key in keys:
        begin(cluster, 1, key)
    cluster.requests = 0
    done: list[int] = []

    async def write(number: int, key: ShareKey) -> None:
        await cluster.nodes[1].persister.write(key, 0, 0, leased(number, number, durable=True))
        done.append(number)

    for number, key in enumerate(keys):
        cluster.nodes[1].scheduler.spawn(write(number, key), name="write")
    cluster.simulation.run_until(lambda: len(done) == len(keys))
    assert done == list(range(20))
    assert cluster.requests == 1


def test_what_is_to_be_appended_does_not_wait_for_what_is_to_be_committed() -> None:
    cluster = StateCluster()
    one, other = keys_in(2, 2)
    begin(cluster, 1, one)
    begin(cluster, 1, other)
    done: list[str] = []

    async def write(key: ShareKey, name: str, *, durable: bool) -> None:
        await cluster.nodes[1].persister.write(key, 0, 0, leased(1, 1, durable=durable))
        done.append(name)

    cluster.nodes[1].scheduler.spawn(write(one, "durable", durable=True), name="write")
    cluster.nodes[1].scheduler.spawn(write(other, "quick", durable=False), name="write")
    cluster.simulation.run_until(lambda: len(done) == 2)
    assert done == ["quick", "durable"]


def test_only_brokers_that_authenticated_in_their_session_of_now_are_answered() -> None:
    cluster = StateCluster()
    key = keys_in(2)[0]
    begin(cluster, 1, key)
    node = cluster.nodes[3]
    own = BrokerIdentity(1, 11)
    for sender, peer, code in (
        (RequestSender(1, 11), own, 0),
        (RequestSender(1, 11), None, 31),
        (RequestSender(1, 1 << 62), None, 31),
        (RequestSender(1, 11), BrokerIdentity(2, 12), 31),
        (RequestSender(1, 10), own, 31),
        (RequestSender(1, 12), own, 31),
        (RequestSender(1, 10), BrokerIdentity(1, 10), 77),
        (RequestSender(1, 12), BrokerIdentity(1, 12), 77),
        (RequestSender(9, 99), BrokerIdentity(9, 99), 77),
    ):
        request = encode_request(ApiKey.READ_SHARE_GROUP_STATE, sender, [StateRequestEntry(key)], "c")
        answers = decode_response(ApiKey.READ_SHARE_GROUP_STATE, cluster.run(node.serve(request, peer)))
        assert [each.error_code for each in answers] == [code], (sender, peer)
    assert node.refused == [31] * 5 + [77] * 3


# When the state moves


def test_a_write_after_the_state_moved_is_refused_and_what_may_be_leased_is_withheld() -> None:
    cluster = StateCluster()
    key = keys_in(2)[0]
    begin(cluster, 1, key)
    persister = cluster.nodes[1].persister
    cluster.run(persister.write(key, 0, 0, leased(0, 9)))
    cluster.move(2, 2, truncated=True)
    with pytest.raises(NotCoordinator):
        cluster.run(persister.write(key, 0, 0, leased(10, 19)))
    state = cluster.run(persister.read(key, 0))
    assert (state.changes, state.is_complete, state.withheld_ms) == ((), False, LOCK_MS)
    assert state.lease_bound == 100


def test_a_reading_of_one_leader_of_the_state_is_none_of_the_next() -> None:
    cluster = StateCluster()
    key = keys_in(2)[0]
    begin(cluster, 1, key)
    cluster.move(2, 2)
    assert cluster.run(cluster.nodes[3].persister.read(key, 0)) is not None  # the first there, as it was here
    with pytest.raises(NotCoordinator):
        cluster.run(cluster.nodes[1].persister.write(key, 0, 0, leased(0, 9)))


def test_a_leader_that_is_still_there_writes_its_whole_state_where_it_is_now() -> None:
    cluster = StateCluster()
    key = keys_in(2)[0]
    begin(cluster, 1, key)
    persister = cluster.nodes[1].persister
    cluster.run(persister.write(key, 0, 0, leased(0, 9)))
    cluster.move(2, 2, truncated=True)
    with pytest.raises(NotCoordinator):
        cluster.run(persister.write(key, 0, 0, leased(10, 19)))
    changes = (StateBatch(0, 19, ACQUIRED, 1, holder="m"),)
    cluster.run(persister.write(key, 0, 0, begun()._replace(changes=changes)))
    cluster.run(persister.write(key, 0, 0, leased(20, 20)))
    state = cluster.run(persister.read(key, 1))
    assert state.is_complete
    assert state.changes == (StateBatch(0, 20, ACQUIRED, 1, holder="m"),)


def test_while_no_broker_leads_a_read_waits_and_then_reports_it() -> None:
    cluster = StateCluster()
    key = keys_in(2)[0]
    begin(cluster, 1, key)
    cluster.leaders[2] = -1
    began_ms = cluster.simulation.now_ms
    with pytest.raises(CoordinatorNotAvailable):
        cluster.run(cluster.nodes[1].persister.read(key, 0))
    assert 4000 < cluster.simulation.now_ms - began_ms < 6000
    cluster.leaders[2] = 3
    assert cluster.run(cluster.nodes[1].persister.read(key, 0)) is not None


@pytest.mark.parametrize("seed", range(examples(10, 40)))
def test_what_was_acknowledged_stays_so_whatever_the_network_and_the_leaders_do(seed: int) -> None:
    """A leader that leases and acknowledges, reads again or writes all it knows when a write fails; requests are lost,
    come late and twice; the state moves, with or without what was not committed."""
    cluster = StateCluster(seed, lost=0.15, repeated=0.2)
    random_fraction = Random(seed)
    key = key_of(f"g{seed}")
    leader = _Leader(cluster, key, random_fraction)
    cluster.run(
        leader.share_partition(60),
    )
    cluster.lost = cluster.repeated = 0.0
    cluster.simulation.run_for(1000)
    state = cluster.run(cluster.nodes[1].persister.read(key, 1000))
    leader.check(state)
    assert leader.acked, "something was acknowledged"


class _Leader:
    def __init__(self, cluster: StateCluster, key: ShareKey, random_fraction: Random) -> None:
        self.cluster, self.key, self.random_fraction = cluster, key, random_fraction
        self.acked: dict[int, None] = {}
        self.known: dict[int, StateBatch] = {}
        self.epoch = 0

    @property
    def persister(self) -> Any:
        return self.cluster.nodes[self.epoch % 3 + 1].persister

    def check(self, state: LoadedState | None) -> None:
        found = self.spread(state.changes) if state is not None else {}
        lost = [
            offset for offset in self.acked if found.get(offset, StateBatch(0, 0, 0, 0)).state != ACKNOWLEDGED
        ]
        assert not lost, f"acknowledged and taken back: {lost}"

    def spread(self, changes: tuple[StateBatch, ...]) -> dict[int, StateBatch]:
        return {
            offset: each._replace(first=offset, last=offset)
            for each in changes
            for offset in range(each.first, each.last + 1)
        }

    async def read(self) -> None:
        while True:
            try:
                state = await self.persister.read(self.key, self.epoch)
                if state is None:
                    assert not self.acked
                    await self.persister.write(self.key, 0, self.epoch, begun(lease_bound=1000))
                    state = await self.persister.read(self.key, self.epoch)
            except MansioError:
                continue
            self.check(state)
            self.known = self.spread(state.changes)
            return

    async def share_partition(self, steps: int) -> None:
        await self.read()
        for number in range(steps):
            if self.random_fraction.random() < 0.08:
                index = partition_for(share_partition_key(self.key), PARTITIONS)
                self.cluster.move(
                    index, self.random_fraction.randint(1, 3), truncated=self.random_fraction.random() < 0.5
                )
            if self.random_fraction.random() < 0.05:
                self.epoch += 1
                await self.read()
            await self.step(number)

    async def step(self, number: int) -> None:
        """Lease one record and acknowledge another."""
        update = leased(number, number)
        open_ones = [offset for offset, change in self.known.items() if change.state == ACQUIRED]
        offset = (
            self.random_fraction.choice(open_ones)
            if open_ones and self.random_fraction.random() < 0.6
            else None
        )
        if offset is not None:
            update = Update(0, True, 0, 1000, 0, (StateBatch(offset, offset, ACKNOWLEDGED, 1),))
        self.known |= self.spread(update.changes)
        try:
            await self.persister.write(self.key, 0, self.epoch, update)
        except MansioError:
            if self.random_fraction.random() < 0.5 or not await self.is_full_request():
                await self.read()
                return
        if offset is not None:
            self.acked[offset] = None

    async def is_full_request(self) -> bool:
        changes = tuple(change for _, change in sorted(self.known.items()))
        try:
            await self.persister.write(
                self.key, 0, self.epoch, begun(lease_bound=1000)._replace(changes=changes)
            )
        except MansioError:
            return False
        return True
