"""No record passes an earlier one of its partition that the client fetched before it, whatever happens to their leases.

The model is a broker that leases the records of a partition in order, to one member. It answers a renewal late, or
refuses it, ends leases, and leases the records of ended and released leases again.
"""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.client import TopicPartition
from mansio.client.share.in_flight_records import InFlightRecords
from mansio.client.share.leased import ACCEPT, RELEASE, Leased, ReceiveOptions
from mansio.wire.batch.record_batch import build_batch
from support.tiers import examples
from support.virtual_time import run_virtually

PLACE = TopicPartition("t", 0)
NODE = 1
LEASE_S = 2.0
STEP_S = 0.4


class Broker:
    """The broker and the target of acknowledgements. `leases`: end of each lease; `delivered`: offsets that the
    application has received, `done`: those that it has acknowledged."""

    def __init__(self, *, auto_extend: bool) -> None:
        self.loop = asyncio.get_running_loop()
        options = ReceiveOptions("g", auto_extend=auto_extend, keeps_leases=True)
        self.records = InFlightRecords(options, lambda: None, self.ask_for_order)
        self.records.acknowledge_with(self)
        self.leases: dict[int, float] = {}
        self.renewals: list[Leased] = []
        self.releases: list[Leased] = []
        self.delivered: set[int] = set()
        self.done: set[int] = set()
        self.is_asked_for_order = False

    def ask_for_order(self) -> None:
        self.is_asked_for_order = True

    async def acknowledge(
        self, message: Leased, ack_type: int, *, delay_ms: int = -1, reason: str = ""
    ) -> None:
        raise AssertionError("the application acknowledges through the model")

    def renew_in_background(self, message: Leased) -> None:
        self.renewals.append(message)

    def release(self, message: Leased) -> None:
        held, _ = self.records.start_acknowledging((message,))
        self.releases += held

    def seconds_left(self, message: Leased) -> float:
        return self.records.seconds_left(message)

    def fetch(self, count: int) -> None:
        """Lease the first records that are neither done nor leased."""
        now = self.loop.time()
        self.leases = {offset: end for offset, end in self.leases.items() if end > now}
        offset = 0
        for _ in range(count):
            while offset in self.done or offset in self.leases:
                offset += 1
            self.leases[offset] = now + LEASE_S
            data = build_batch([(1, b"key", b"", ())], base_offset=offset)
            self.records.add_acquired(PLACE, NODE, memoryview(data), [(offset, offset, 1)], LEASE_S)

    def answer_renewal(self, index: int, *, accepts: bool) -> None:
        if not self.renewals:
            return
        message = self.renewals.pop(index % len(self.renewals))
        is_leased = self.leases.get(message.offset, 0.0) > self.loop.time()
        if accepts and is_leased:
            self.leases[message.offset] = self.loop.time() + LEASE_S
            self.records.on_renewed(message, LEASE_S)
        else:
            self.leases.pop(message.offset, None)
            self.records.on_not_renewed(message)

    def answer_releases(self) -> None:
        for message in self.releases:
            self.leases.pop(message.offset, None)
            self.records.on_acknowledged(PLACE, [message], RELEASE)
        self.releases.clear()

    def end_session(self) -> None:
        self.records.on_session_ended(NODE)
        for partition in list(self.records.suspect_partitions):
            self.records.renew_suspect_leases(partition, can_renew=True)

    def poll(self, most: int) -> list[int]:
        """Check the order of what the application receives, and acknowledge it."""
        found = self.records.pop(most)
        for message in found:
            passed = set(range(message.offset)) - self.delivered
            assert not passed, f"{message.offset} is received before {sorted(passed)}"
            self.delivered.add(message.offset)
        held, _ = self.records.start_acknowledging(found)
        self.records.on_acknowledged(PLACE, held, ACCEPT)
        for message in held:
            self.leases.pop(message.offset, None)
            self.done.add(message.offset)
        return [message.offset for message in found]


STEP = st.tuples(
    st.sampled_from(["fetch", "fetch", "poll", "session", "renewed", "refused", "time", "released", "order"]),
    st.integers(0, 5),
)


@settings(max_examples=examples(100, 1_000))
@given(st.lists(STEP, min_size=8, max_size=40), st.booleans())
def test_no_record_passes_an_earlier_one_whose_lease_is_suspect_or_lost(
    steps: list[tuple[str, int]], auto_extend: bool
) -> None:
    async def scenario() -> None:
        broker = Broker(auto_extend=auto_extend)
        for step, number in steps:
            if step == "fetch":
                broker.fetch(number)
            elif step == "poll":
                broker.poll(number + 1)
            elif step == "session":
                broker.end_session()
            elif step == "released":
                broker.answer_releases()
            elif step == "order":
                broker.records.set_order(has_order=True)
            elif step == "time":
                await asyncio.sleep(number * STEP_S)
            else:
                broker.answer_renewal(number, accepts=step == "renewed")
            if number % 2:
                await asyncio.sleep(0)
        broker.records.close()

    run_virtually(scenario())


def test_a_record_waits_for_the_renewal_of_an_earlier_one() -> None:
    async def scenario() -> None:
        broker = Broker(auto_extend=True)
        broker.fetch(3)
        broker.end_session()
        broker.answer_renewal(1, accepts=True)
        broker.answer_renewal(1, accepts=True)
        assert broker.poll(5) == []
        broker.answer_renewal(0, accepts=True)
        assert broker.poll(5) == [0, 1, 2]

    run_virtually(scenario())


def test_records_behind_one_that_was_lost_before_delivery_are_released_in_a_group_with_order() -> None:
    async def scenario() -> None:
        broker = Broker(auto_extend=True)
        lose_the_first_of_three(broker)
        await asyncio.sleep(0)
        assert broker.is_asked_for_order
        assert broker.poll(5) == [], "the order is unknown"
        assert broker.releases == []
        broker.records.set_order(has_order=True)
        assert broker.poll(5) == []
        assert [message.offset for message in broker.releases] == [1, 2]
        broker.answer_releases()
        broker.fetch(3)
        assert broker.poll(5) == [0, 1, 2]
        assert broker.records.held_count == broker.records.undelivered_count == 0

    run_virtually(scenario())


def test_records_behind_one_that_was_lost_stay_in_a_group_without_order() -> None:
    async def scenario() -> None:
        broker = Broker(auto_extend=True)
        lose_the_first_of_three(broker)
        assert broker.poll(5) == []
        broker.records.set_order(has_order=False)
        broker.delivered.add(0)  # not checked here
        assert broker.poll(5) == [1, 2]
        assert broker.releases == []

    run_virtually(scenario())


def lose_the_first_of_three(broker: Broker) -> None:
    broker.fetch(3)
    broker.end_session()
    broker.answer_renewal(0, accepts=False)
    broker.answer_renewal(0, accepts=True)
    broker.answer_renewal(0, accepts=True)
