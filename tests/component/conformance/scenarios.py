"""Scenarios that every protocol has to play in the same way. Each returns what its client saw, and has what it has to
see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer

from component.conformance.protocol import (
    ATTEMPTS,
    DEDUPLICATION,
    DELAYS,
    INVALID,
    LEASE_LOST,
    LEASE_S,
    LOG_APPEND_TIME,
    PRIORITY,
    TOO_LARGE,
    UNKNOWN_ID,
    UNKNOWN_TOPIC,
    WAIT_S,
    WRONG_STATE,
    Refused,
)
from support.machine import scaled
from support.open_transactions import hang, open_transaction
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from component.conformance.protocol import Protocol, Received


@dataclass(frozen=True, slots=True)
class Scenario:
    """`needs`: what a protocol must be able to express. `expected`: the result of `play`."""

    name: str
    play: Callable[[Protocol, str], list[Any]]
    expected: Sequence[Any]
    needs: tuple[str, ...] = ()


def seen(records: Sequence[Received]) -> list[tuple[str, int]]:
    return [(each.value, each.deliveries) for each in records]


def outcome(call: Callable[[], object]) -> str:
    """Return "done", or the name of the error."""
    try:
        call()
    except Refused as error:
        return str(error)
    return "done"


def publish_and_accept(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    for value in ("a", "b", "ä€😀"):
        one.publish(topic, value, key="k")
    taken = one.take(topic, 3, "accept")
    one.broker.clock.advance(seconds=LEASE_S + 1)
    return [seen(taken), {each.key for each in taken}, one.is_empty(topic)]


def lease_expires(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    one.publish(topic, "a")
    first = one.receive(topic, 1)
    during = one.is_empty(topic)
    one.broker.clock.advance(seconds=LEASE_S + 1)
    return [seen(first), during, seen(one.take(topic, 1, "accept"))]


def late_ack_is_refused(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    one.publish(topic, "a")
    (first,) = one.receive(topic, 1)
    one.broker.clock.advance(seconds=LEASE_S + 1)
    (second,) = one.receive(topic, 1)
    late = outcome(lambda: one.accept(topic, first))
    in_time = outcome(lambda: one.accept(topic, second))
    one.broker.clock.advance(seconds=LEASE_S + 1)
    return [late, in_time, one.is_empty(topic)]


def release(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    one.publish(topic, "a")
    return [seen(one.take(topic, 1, "release")), seen(one.take(topic, 1, "accept")), one.is_empty(topic)]


def retry_with_delay(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    one.publish(topic, "a")
    (record,) = one.receive(topic, 1)
    one.retry(topic, record, 600)
    before = one.is_empty(topic)
    one.broker.clock.advance(seconds=590)
    before = before and one.is_empty(topic)
    one.broker.clock.advance(seconds=11)
    return [before, seen(one.take(topic, 1, "accept"))]


def extend_lease(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    one.publish(topic, "a")
    (record,) = one.receive(topic, 1)
    one.extend(topic, record, 10 * LEASE_S)
    one.broker.clock.advance(seconds=9 * LEASE_S)
    during = one.is_empty(topic)
    one.broker.clock.advance(seconds=LEASE_S + 1)
    return [during, seen(one.take(topic, 1, "accept"))]


def dead_letter_after_attempts(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    one.publish(topic, "a")
    taken = [seen(one.take(topic, 1, "release")) for _ in range(ATTEMPTS)]
    return [taken, one.is_empty(topic), one.dead_letters(topic)]


def reject(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    one.publish(topic, "a")
    one.publish(topic, "b")
    rejected = seen(one.take(topic, 1, "reject"))
    return [rejected, seen(one.take(topic, 1, "accept")), one.is_empty(topic), one.dead_letters(topic)]


def redrive(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    one.publish(topic, "a")
    for _ in range(ATTEMPTS):
        one.take(topic, 1, "release")
    dead = one.dead_letters(topic)
    count = one.redrive(topic)
    (again,) = one.take(topic, 1, "accept")
    return [dead, count, again.value, one.is_empty(topic)]


def order_by_key(one: Protocol, topic: str) -> list[Any]:
    one.create(topic, by_key=True)
    for value, key in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a")):
        one.publish(topic, value, key=key)
    (first,) = one.receive(topic, 1)
    (other,) = one.receive(topic, 1)
    blocked = one.is_empty(topic)
    one.accept(topic, first)
    (second,) = one.receive(topic, 1)
    one.accept(topic, second)
    one.accept(topic, other)
    (third,) = one.receive(topic, 1)
    one.accept(topic, third)
    return [first.value, other.value, blocked, second.value, third.value, one.is_empty(topic)]


def priorities(one: Protocol, topic: str) -> list[Any]:
    one.create(topic, **dict[str, Any]({PRIORITY: "true"}))
    for priority in ("low", "normal", "high"):
        one.publish(topic, priority, priority=priority)
    return [one.take(topic, 1, "accept")[0].value for _ in range(3)] + [one.is_empty(topic)]


def delay(one: Protocol, topic: str) -> list[Any]:
    one.create(topic, **dict[str, Any]({DELAYS: "true"}))
    one.publish(topic, "later", delay_s=600)
    one.publish(topic, "now")
    now = seen(one.take(topic, 1, "accept"))
    one.broker.clock.advance(seconds=590)
    before = one.is_empty(topic)
    one.broker.clock.advance(seconds=11)
    return [now, before, seen(one.take(topic, 1, "accept"))]


def deduplication(one: Protocol, topic: str) -> list[Any]:
    one.create(topic, **dict[str, Any]({DEDUPLICATION: "300000"}))
    for value, dedup_id in (("a", "1"), ("again", "1"), ("b", "2")):
        one.publish(topic, value, key="k", dedup_id=dedup_id)
    within = [each.value for _ in range(2) for each in one.take(topic, 1, "accept")]
    is_empty = one.is_empty(topic)
    one.broker.clock.advance(seconds=301)
    one.publish(topic, "later", key="k", dedup_id="1")
    return [within, is_empty, one.take(topic, 1, "accept")[0].value]


def replay_by_time(one: Protocol, topic: str) -> list[Any]:
    # The clock of the test broker, for every client.
    one.create(topic, **dict[str, Any]({LOG_APPEND_TIME: "LogAppendTime"}))
    one.publish(topic, "early")
    one.broker.clock.advance(seconds=3600)
    between_ms = one.broker.clock.time_ms() - 1_800_000
    one.publish(topic, "late")
    one.take(topic, 2, "accept")
    return [one.read_from(topic, between_ms), one.read_from(topic, 0)]


def only_committed(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    one.admin.admin.alter_group_config(one.group(topic), {"share.isolation.level": "read_committed"})
    producer = Producer(
        {"bootstrap.servers": one.broker.bootstrap_servers, "transactional.id": topic, "linger.ms": 0}
    )
    producer.init_transactions(scaled(WAIT_S))

    def write(*values: str) -> None:
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, partition=0)
            producer.flush(scaled(WAIT_S))

    write("aborted", "aborted, too")
    producer.abort_transaction(scaled(WAIT_S))
    write("a", "b")
    one.publish(topic, "c")
    during = one.is_empty(topic)
    producer.commit_transaction(scaled(WAIT_S))
    taken = one.take(topic, 3, "accept")
    write("aborted")
    producer.abort_transaction(scaled(WAIT_S))
    one.broker.clock.advance(seconds=LEASE_S + 1)
    return [during, seen(taken), one.is_empty(topic)]


def errors(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    return [
        outcome(lambda: one.publish(f"{topic}-unknown", "a")),
        outcome(lambda: one.take(f"{topic}-unknown", 1, "accept")),
        outcome(lambda: one.publish(topic, "x" * 3_000_000)),
        one.is_empty(topic),
    ]


def invalid_argument(one: Protocol, topic: str) -> list[Any]:
    one.create(topic, **dict[str, Any]({DELAYS: "true"}))
    return [outcome(lambda: one.publish(topic, "a", delay_s=400 * 86_400)), one.is_empty(topic)]


def receive_beside_transactions(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    one.publish(topic, "a")
    open_transaction(one.broker.bootstrap_servers, f"receive-{topic}", topic, ["b"]).commit_transaction(
        WAIT_S
    )
    one.publish(topic, "c")
    taken = [seen(one.take(topic, 1, "accept")) for _ in range(3)]
    one.broker.clock.advance(seconds=LEASE_S + 1)
    return [taken, one.is_empty(topic)]


def transactions(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    transactional_id = f"id-{topic}"
    open_transaction(one.broker.bootstrap_servers, transactional_id, topic, ["a"])
    state, partitions = one.transaction(transactional_id)
    found: list[Any] = [
        one.transactions(f"{transactional_id}.*") == [(transactional_id, "Ongoing")],
        (state, partitions == [f"{topic}-0"]),
        one.hanging(topic),
        outcome(lambda: one.abort(topic, 0)),
    ]
    one.terminate(transactional_id)
    wait_until(lambda: one.transaction(transactional_id)[1] == [], WAIT_S)
    return found


def hanging_transaction(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    one.admin.publish(topic, b"before")
    hang(one.broker, topic)
    found = one.hanging(topic)
    one.abort(topic, 1)
    return [found, one.hanging(topic), outcome(lambda: one.abort(topic, 1))]


def transaction_errors(one: Protocol, topic: str) -> list[Any]:
    one.create(topic)
    return [
        outcome(lambda: one.transaction(f"nobody-{topic}")),
        outcome(lambda: one.terminate(f"nobody-{topic}")),
        outcome(lambda: one.abort(topic, 0)),
        outcome(lambda: one.hanging(f"{topic}-unknown")),
        one.transactions(f"nobody-{topic}"),
    ]


SCENARIOS = (
    Scenario(
        "publish, receive, accept",
        publish_and_accept,
        [[("a", 1), ("b", 1), ("ä€😀", 1)], {"k"}, True],
    ),
    Scenario("a lease expires", lease_expires, [[("a", 1)], True, [("a", 2)]], ("lease",)),
    Scenario(
        "a late acknowledgement is refused",
        late_ack_is_refused,
        [LEASE_LOST, "done", True],
        ("lease", "late_error"),
    ),
    Scenario("release: the next delivery", release, [[("a", 1)], [("a", 2)], True]),
    Scenario("retry after a delay", retry_with_delay, [True, [("a", 2)]], ("lease", "retry_delay")),
    Scenario("extend a lease", extend_lease, [True, [("a", 2)]], ("lease", "extend")),
    Scenario(
        "dead letter after the last attempt",
        dead_letter_after_attempts,
        [[[("a", number + 1)] for number in range(ATTEMPTS)], True, ["a"]],
    ),
    Scenario("reject: a dead letter at once", reject, [[("a", 1)], [("b", 1)], True, ["a"]], ("reject",)),
    Scenario("redrive dead letters", redrive, [["a"], 1, "a", True], ("redrive",)),
    Scenario("order by key", order_by_key, ["a1", "b1", True, "a2", "a3", True], ("lease",)),
    Scenario("priorities", priorities, ["high", "normal", "low", True], ("priority",)),
    Scenario("delayed records", delay, [[("now", 1)], True, [("later", 1)]]),
    Scenario("deduplication by id", deduplication, [["a", "b"], True, "later"], ("dedup",)),
    Scenario("replay by time", replay_by_time, [["late"], ["early", "late"]], ("replay",)),
    Scenario(
        "a group with read_committed",
        only_committed,
        [True, [("a", 1), ("b", 1), ("c", 1)], True],
    ),
    Scenario(
        "receive beside transactions",
        receive_beside_transactions,
        [[[("a", 1)], [("b", 1)], [("c", 1)]], True],
    ),
    Scenario(
        "transactions: list, describe, terminate",
        transactions,
        [True, ("Ongoing", True), [], WRONG_STATE],
        ("transactions",),
    ),
    Scenario(
        "a hanging transaction: find, abort", hanging_transaction, [[1], [], WRONG_STATE], ("transactions",)
    ),
    Scenario(
        "errors: transactional id, topic, state",
        transaction_errors,
        [UNKNOWN_ID, UNKNOWN_ID, WRONG_STATE, UNKNOWN_TOPIC, []],
        ("transactions",),
    ),
    Scenario("errors: topic, size", errors, [UNKNOWN_TOPIC, UNKNOWN_TOPIC, TOO_LARGE, True]),
    Scenario("errors: a delay out of range", invalid_argument, [INVALID, True]),
)
