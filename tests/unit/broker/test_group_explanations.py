"""Facts about groups: what is sent between brokers comes back unchanged, and what is remembered is bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from mansio.broker.coordinator.group.fact_requests import (
    asked_topics,
    read_asked_topics,
    read_response,
    response_fields,
)
from mansio.broker.routing.caller import Caller, ClientSession
from mansio.broker.services.group_explanations.explanation_service import redacted
from mansio.broker.services.quotas import THROTTLED_MAX, ActiveQuotas, QuotaCounters
from mansio.broker.services.recent_refusals import (
    LOOK_UPS,
    REFUSAL_MS_MAX,
    REFUSALS_MAX,
    RecentRefusals,
)
from mansio.state.audit.audit_merger import OTHER_RESOURCES
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.state.blockage.broker_facts import AskedPartition, BrokerFacts, PartitionReport
from mansio.state.blockage.facts import GroupFacts, Place
from mansio.state.blockage.rules import explain
from mansio.state.quota import QuotaEntity, QuotaScope
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from unit.state.test_blockage_model import COUNTS, LOGS, NAMES, PLACES, REFUSALS, SHARES

if TYPE_CHECKING:
    from mansio.state.blockage.facts import ThrottleFacts, TransactionFacts

from mansio.state.blockage import facts as kinds

KEY = ApiKey.COLLECT_GROUP_FACTS
REPORTS = st.builds(
    PartitionReport, PLACES, st.none() | LOGS, st.none() | SHARES, st.sampled_from(["", "not the leader"])
)
TRANSACTIONS: st.SearchStrategy[TransactionFacts] = st.builds(kinds.TransactionFacts, NAMES, COUNTS, COUNTS)
THROTTLES: st.SearchStrategy[ThrottleFacts] = st.builds(
    kinds.ThrottleFacts, NAMES, NAMES, COUNTS, COUNTS, NAMES
)
TOPICS = st.builds(Place, st.sampled_from(["shown", "secret"]), st.integers(0, 2))
HIDDEN_FACTS = st.builds(
    GroupFacts,
    st.just("g"),
    st.sampled_from(kinds.GroupType),
    st.just("Stable"),
    st.lists(
        st.builds(kinds.MemberFacts, NAMES, NAMES, NAMES, st.lists(TOPICS, max_size=3).map(tuple)), max_size=2
    ).map(tuple),
    st.lists(
        st.builds(
            kinds.PartitionFacts,
            TOPICS,
            st.integers(-1, 2),
            position=st.just(0),
            committed_ms=st.just(100_000),
            log=st.none() | LOGS,
            share=st.none() | SHARES,
        ),
        max_size=5,
        unique_by=lambda each: each.place,
    ).map(tuple),
    st.lists(
        st.builds(kinds.TransactionFacts, st.sampled_from(["known", "a secret"]), COUNTS, COUNTS), max_size=2
    ).map(tuple),
    settled_ms=st.just(100_000),
    rebalances=st.integers(0, 20),
    sample_ms=st.just(1_000),
)
BROKER_FACTS = st.builds(
    BrokerFacts,
    st.lists(REPORTS, max_size=4),
    st.lists(TRANSACTIONS, max_size=2),
    st.lists(THROTTLES, max_size=2),
    st.lists(REFUSALS, max_size=2),
)


@given(BROKER_FACTS)
def test_facts_of_a_broker_come_back_from_its_response(found: BrokerFacts) -> None:
    frame = messages.encode_response(KEY, 0, 0, {"error_code": 0, **response_fields(found)})[4:]
    _, response = messages.decode_response_frame(KEY, 0, frame)
    assert read_response(response) == found


@given(
    st.lists(
        st.builds(AskedPartition, PLACES, st.integers(-1, 99)), max_size=6, unique_by=lambda each: each[0]
    ),
    st.data(),
)
def test_asked_partitions_come_back_from_a_request(asked: list[AskedPartition], data: st.DataObject) -> None:
    led = {each.place for each in asked if data.draw(st.booleans())}
    fields = {
        "node_id": 1,
        "broker_epoch": 2,
        "group_id": "g",
        "is_share": True,
        "sample_ms": 0,
        "topics": asked_topics(asked, led),
    }
    body = messages.encode_request(KEY, 0, 0, "c", fields)
    request = messages.decode_request(KEY, 0, memoryview(body)[4 + 8 + 2 + 1 + 1 :])
    found, places = read_asked_topics(request.topics)
    assert set(found) == {each for each in asked if each.place in led}
    assert set(places) == {each.place for each in asked}


@given(HIDDEN_FACTS)
def test_redacted_facts_contain_nothing_that_the_caller_may_not_see(facts: GroupFacts) -> None:
    found, hidden = redacted(facts, shown={"shown"}, readable=(), transactional_ids={"known"})
    assert "secret" not in repr(found)
    assert "secret" not in repr(explain(found, hidden_topics=hidden))
    assert all(
        each.share is None or each.share.held is None or each.share.held.key is None
        for each in found.partitions
    )
    assert {each.transactional_id for each in found.transactions} <= {"known"}
    assert found.lag == facts.lag
    everything, none = redacted(
        facts,
        shown={"shown", "secret"},
        readable={"shown", "secret"},
        transactional_ids={"known", "a secret"},
    )
    assert (everything, none) == (facts, frozenset())


class Now:
    """A clock that a test sets, in seconds."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now * 1000)


def refusals() -> tuple[RecentRefusals, Now, list[Any]]:
    clock, forwarded = Now(), list[Any]()

    def forward(*arguments: Any, event_count: int = 1) -> None:
        forwarded.append((arguments[3], event_count))

    return RecentRefusals(clock, forward), clock, forwarded


def refuse(
    recent: RecentRefusals,
    name: str,
    *,
    user: str = "eve",
    kind: Any = ResourceType.GROUP,
    operation: Operation = Operation.READ,
    api: str = "",
) -> None:
    caller = Caller(ClientSession(user), "client", "10.0.0.1", api=api)
    recent.report(caller, operation, kind, name)


def test_refusals_of_producers_and_administrators_do_not_explain_a_group() -> None:
    recent, _, forwarded = refusals()
    refuse(recent, "t", kind=ResourceType.TOPIC, operation=Operation.WRITE, api="PRODUCE")
    refuse(recent, "g", operation=Operation.DELETE, api="DELETE_GROUPS")
    refuse(recent, "g", operation=Operation.DESCRIBE, api="EXPLAIN_GROUP")
    assert recent.of("g", {"t"}) == []
    refuse(recent, "g", operation=Operation.DESCRIBE, api="FIND_COORDINATOR")
    assert [each.operation for each in recent.of("g", {"t"})] == [Operation.DESCRIBE]
    assert len(forwarded) == 4
    assert set(ApiKey.__members__) >= LOOK_UPS


def test_refusals_are_counted_and_forgotten_after_a_while() -> None:
    recent, clock, forwarded = refusals()
    for _ in range(3):
        refuse(recent, "g")
    refuse(recent, "t", kind=ResourceType.TOPIC)
    refuse(recent, "other")
    clock.now += 2
    found = {(each.resource_type, each.name): (each.times, each.ago_ms) for each in recent.of("g", {"t"})}
    assert found == {(ResourceType.TOPIC, "t"): (1, 2_000), (ResourceType.GROUP, "g"): (3, 2_000)}
    clock.now += REFUSAL_MS_MAX / 1000
    assert recent.of("g", {"t"}) == []
    assert len(forwarded) == 5


def test_refusals_of_other_resources_and_of_unnamed_ones_are_only_forwarded() -> None:
    recent, _, forwarded = refusals()
    refuse(recent, "kafka-cluster", kind=ResourceType.CLUSTER)
    refuse(recent, OTHER_RESOURCES, kind=ResourceType.TOPIC)
    assert recent.of("kafka-cluster", {OTHER_RESOURCES}) == []
    assert len(forwarded) == 2


def test_the_oldest_refusal_gives_way() -> None:
    recent, _, _ = refusals()
    for number in range(REFUSALS_MAX + 1):
        refuse(recent, "g", user=f"user-{number}")
    found = recent.of("g", ())
    assert len(found) == REFUSALS_MAX
    assert found[0].caller.session.user == f"user-{REFUSALS_MAX}"
    assert found[-1].caller.session.user == "user-1"


def test_throttled_readers_are_named_as_long_as_they_pause() -> None:
    clock = Now()
    active = ActiveQuotas(clock, QuotaCounters(), 1_000)
    active.consumers.set_rates({QuotaEntity(client_id="reader"): 1_000.0})
    assert active.record_fetch("u", "reader", 900) == 0
    assert active.throttled_readers() == []
    assert active.record_fetch("u", "reader", 2_100) == 2_000
    assert active.record_fetch("u", "another", 9_000) == 0
    (found,) = active.throttled_readers()
    assert (found.user, found.client_id, found.pause_ms, found.scope, found.rate) == (
        "u",
        "reader",
        2_000,
        QuotaScope(None, "reader"),
        1_000.0,
    )
    clock.now += 3
    assert active.throttled_readers() == []


def test_the_number_of_remembered_throttled_readers_is_bounded() -> None:
    clock = Now()
    active = ActiveQuotas(clock, QuotaCounters(), 1_000)
    names = [f"reader-{number}" for number in range(THROTTLED_MAX + 5)]
    active.consumers.set_rates({QuotaEntity(client_id=name): 1.0 for name in names})
    for name in names:
        assert active.record_fetch("u", name, 100) > 0
    assert {each.client_id for each in active.throttled_readers()} == set(names[5:])
