"""Receiving from the leaders of a cluster, with brokers that are slow, hung or gone: on a simulated clock."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.coordinator.share import lease_forwarder
from mansio.broker.coordinator.share.lease_forwarder import LeaseForwarder
from mansio.broker.coordinator.share.received_records import ReceivedRecord, ReceiveResult
from mansio.broker.routing.caller import ANONYMOUS, Caller
from mansio.broker.services.share_groups.cluster_receive import ClusterReceive, ReceiveRequest
from mansio.errors import ConnectionLost, CorruptLog, MansioError, RequestTimedOut
from mansio.ports import ForwardedAnswer, ForwardedClient
from mansio.testing.scheduler import SimulatedClock, Simulation
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from mansio.wire.headers import read_request_header

if TYPE_CHECKING:
    from collections.abc import Collection

    from mansio.testing.scheduler import SimulatedScheduler

MEMBER = "00" * 16

REQUESTS = 300
"""Number of requests to a broker that does not answer."""


def record(node_id: int, offset: int) -> ReceivedRecord:
    return ReceivedRecord("t", bytes(16), node_id, offset, 1, 0, None, b"value", ())


class FakeReceive:
    """The receive service of broker 1."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def new_member_id(self) -> str:
        return MEMBER

    async def receive_records(self, group_id: str, topics: Collection[str], **more: Any) -> ReceiveResult:
        assert more["max_wait_ms"] == 0
        return await self._cluster.take(1, more["max_records"])

    async def wait_for_records(self, group_id: str, topics: Collection[str], *, max_wait_ms: int) -> bool:
        return await self._cluster.wait(1, max_wait_ms)

    async def release(self, group_id: str, member_id: str) -> None:
        self._cluster.released.append(1)


class FakeCluster:
    """Brokers with records; implements what `ClusterReceive` uses of a `LeaseForwarder`. This broker is 1."""

    node_id = 1

    def __init__(self, scheduler: SimulatedScheduler, brokers: int = 3) -> None:
        self.scheduler = scheduler
        self.records: dict[int, list[ReceivedRecord]] = {node_id: [] for node_id in range(1, brokers + 1)}
        self.hung: set[int] = set()
        self.errors: dict[int, MansioError] = {}
        self.promises_too_much = False
        self.asked: list[int] = []
        self.released: list[int] = []

    def partitions_by_leader(self, topics: Collection[str]) -> dict[int, list[tuple[str, int]]]:
        return {node_id: [("t", node_id)] for node_id in self.records}

    def may_wait(self, *_: object) -> bool:
        return True

    async def take(self, node_id: int, max_records: int) -> ReceiveResult:
        self.asked.append(node_id)
        if node_id in self.errors:
            return ReceiveResult(MEMBER, [], 0, {("t", node_id): self.errors[node_id]})
        found = self.records[node_id][:max_records]
        del self.records[node_id][:max_records]
        return ReceiveResult(MEMBER, found, 30_000 if found else 0, {})

    async def receive(self, node_id: int, *_: object, timeout_ms: float, **more: Any) -> ReceiveResult:
        if node_id in self.hung:
            self.asked.append(node_id)
            await self.scheduler.sleep(timeout_ms)
            raise ConnectionLost("no answer")
        return await self.take(node_id, more["max_records"])

    async def wait(self, node_id: int, wait_ms: float) -> bool:
        for _ in range(int(wait_ms // 10)):
            if self.records[node_id] or self.promises_too_much:
                return True
            await self.scheduler.sleep(10)
        return False

    async def wait_for_records(self, node_id: int, group_id: str, topics: Collection[str]) -> bool:
        return await self.wait(node_id, 5_000)

    async def release(self, node_id: int, group_id: str, member_id: str, caller: Caller) -> None:
        self.released.append(node_id)


class ClusterReceiveBench:
    def __init__(self, seed: int = 1) -> None:
        self.simulation = Simulation(seed)
        self.scheduler = self.simulation.scheduler()
        self.clock = SimulatedClock(self.simulation)
        self.cluster = FakeCluster(self.scheduler)
        self._begin = self.clock.monotonic()

    @property
    def elapsed_s(self) -> float:
        return self.clock.monotonic() - self._begin

    def call(self, max_records: int = 10, caller: Caller = ANONYMOUS) -> ClusterReceive:
        request = ReceiveRequest("g", ["t"], max_records, 1 << 20, -1, caller)
        cluster: Any = self.cluster
        receive: Any = FakeReceive(self.cluster)
        chance = random.Random(1)
        return ClusterReceive(
            request,
            receive=receive,
            forwarder=cluster,
            scheduler=self.scheduler,
            clock=self.clock,
            random=chance,  # type: ignore[arg-type]  # only `uniform` is used
        )

    def receive(self, max_wait_ms: int, max_records: int = 10, caller: Caller = ANONYMOUS) -> ReceiveResult:
        return self.simulation.run(self.call(max_records, caller).run(max_wait_ms))


def test_records_of_all_leaders_are_received_up_to_the_limit() -> None:
    world = ClusterReceiveBench()
    for node_id in (1, 2, 3):
        world.cluster.records[node_id] = [record(node_id, offset) for offset in range(4)]
    assert len(world.receive(0, max_records=10).records) == 10
    assert len(world.receive(0, max_records=10).records) == 2
    assert world.receive(0).records == []
    assert not world.cluster.released


@pytest.mark.parametrize("node_id", [1, 2, 3])
def test_waiting_call_gets_a_record_of_any_leader_at_once(node_id: int) -> None:
    world = ClusterReceiveBench()
    world.scheduler.call_later(3_000, lambda: world.cluster.records[node_id].append(record(node_id, 7)))
    result = world.receive(20_000)
    assert [each.offset for each in result.records] == [7]
    assert world.elapsed_s < 3.2


def test_time_of_a_call_without_records_is_kept() -> None:
    world = ClusterReceiveBench()
    assert world.receive(12_345).records == []
    assert 12.3 < world.elapsed_s < 12.5
    deadline = world.clock.monotonic() + 2
    world.receive(20_000, caller=Caller(deadline=deadline))
    assert world.clock.monotonic() < deadline + 0.1


def test_records_do_not_age_while_another_leader_is_hung() -> None:
    world = ClusterReceiveBench()
    world.cluster.hung = {2, 3}
    world.cluster.records[1] = [record(1, 0)]
    result = world.receive(20_000)
    assert [each.offset for each in result.records] == [0]
    assert world.elapsed_s < 5  # a hung leader that is asked first costs two seconds at the end of the time
    assert set(world.cluster.released) <= {2, 3}


def test_hung_leaders_are_in_the_errors_and_their_leases_are_released() -> None:
    world = ClusterReceiveBench()
    world.cluster.hung = {2, 3}
    result = world.receive(0)
    assert {index for _, index in result.errors} == {2, 3}
    assert all(isinstance(error, ConnectionLost) for error in result.errors.values())
    world.simulation.run_for(100)
    assert sorted(world.cluster.released) == [2, 3]


def test_error_that_stays_ends_the_call() -> None:
    world = ClusterReceiveBench()
    world.cluster.errors[2] = CorruptLog("damaged")
    result = world.receive(20_000)
    assert world.elapsed_s < 1
    assert isinstance(result.errors["t", 2], CorruptLog)


def test_records_that_cannot_be_leased_cost_fewer_and_fewer_rounds() -> None:
    world = ClusterReceiveBench()
    world.cluster.promises_too_much = True
    world.receive(20_000)
    assert len(world.cluster.asked) < 3 * 60  # 20 s, two rounds each second after the first ones


def test_cancelled_call_releases_what_it_has_leased() -> None:
    world = ClusterReceiveBench()
    world.cluster.records[1] = [record(1, 0)]
    world.cluster.hung = {2, 3}
    task = world.scheduler.spawn(world.call().run(20_000), name="call")
    world.simulation.run_until(lambda: 1 in world.cluster.asked)
    task.cancel()
    world.simulation.run_for(30_000)
    assert 1 in world.cluster.released


# ---------------------------------------------------------------- connections


class FakePeers:
    """Connections whose answers the test gives."""

    def __init__(self, scheduler: SimulatedScheduler) -> None:
        self._scheduler = scheduler
        self.requests: list[tuple[int, Any]] = []
        self.forwarded: list[tuple[ApiKey, str | None, str, bool]] = []
        """API, client id, address and `is_own` of each forwarded request."""

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        promise = self._scheduler.promise()
        self.requests.append((node_id, promise))

        def time_out() -> None:
            if not promise.done():
                promise.set_exception(RequestTimedOut("no answer"))

        self._scheduler.call_later(timeout_ms, time_out)
        answer: bytes = await promise
        return answer

    async def forward(
        self, node_id: int, request: bytes, *, client: ForwardedClient, is_own: bool, timeout_ms: float
    ) -> ForwardedAnswer:
        header = read_request_header(request)
        self.forwarded.append((ApiKey(header.api_key), header.client_id, client.address, is_own))
        return ForwardedAnswer(await self.send(node_id, request, timeout_ms=timeout_ms))

    def waiting(self, node_id: int) -> list[Any]:
        return [promise for to, promise in self.requests if to == node_id and not promise.done()]

    def answer(self, node_id: int) -> None:
        fields = messages.encode_response(ApiKey.RELEASE_LEASES, 0, 0, {})
        self.waiting(node_id)[0].set_result(fields[4:])


class Forwarding:
    def __init__(self) -> None:
        self.simulation = Simulation(1)
        self.scheduler = self.simulation.scheduler()
        self.peers = FakePeers(self.scheduler)
        self.forwarder = LeaseForwarder(
            node_id=1,
            broker_epoch=lambda: 1,
            state=None,  # type: ignore[arg-type]  # no leader is looked up
            peers=self.peers,
            data_peers=self.peers,
            scheduler=self.scheduler,
        )
        self.outcomes: list[MansioError | None] = []

    def release(self, node_id: int) -> Any:
        async def run() -> None:
            try:
                await self.forwarder.release(node_id, "g", MEMBER, ANONYMOUS)
            except MansioError as error:
                self.outcomes.append(error)
            else:
                self.outcomes.append(None)

        return self.scheduler.spawn(run(), name="release")


def test_hung_broker_blocks_no_request_to_another_one() -> None:
    one = Forwarding()
    for _ in range(REQUESTS):
        one.release(2)
    one.simulation.run_for(1)
    one.release(3)
    one.simulation.run_until(lambda: one.peers.waiting(3), within_ms=10)
    one.peers.answer(3)
    one.simulation.run_until(lambda: one.outcomes == [None], within_ms=10)


def test_every_request_for_a_caller_is_forwarded_with_its_id_and_address() -> None:
    one = Forwarding()
    forwarder, caller = one.forwarder, Caller(client_id="alice", address="10.0.0.1")
    works = [
        forwarder.receive(
            2,
            "g",
            ["t"],
            member_id=MEMBER,
            max_records=1,
            max_bytes=1,
            lease_ms=-1,
            caller=caller,
            timeout_ms=1,
        ),
        forwarder.acknowledge(2, "g", MEMBER, bytes(16), 0, [], caller),
        forwarder.release(2, "g", MEMBER, caller),
        forwarder.register(2, "g", ["t"], caller),
    ]
    tasks = [one.scheduler.spawn(work, name="request") for work in works]
    one.simulation.run_for(0)
    for task in tasks:
        task.cancel()
    one.simulation.run_for(1)
    assert one.peers.forwarded == [
        (ApiKey.RECEIVE_RECORDS, "alice", "10.0.0.1", True),
        (ApiKey.ACKNOWLEDGE_RECORDS, "alice", "10.0.0.1", False),
        (ApiKey.RELEASE_LEASES, "alice", "10.0.0.1", True),
        (ApiKey.REGISTER_SHARE_GROUP, "alice", "10.0.0.1", True),
    ]


def test_callers_share_one_wait_and_few_are_woken_for_what_is_available() -> None:
    one = Forwarding()
    woken: list[bool] = []

    async def wait() -> None:
        woken.append(await one.forwarder.wait_for_records(2, "g", ["t"]))

    for _ in range(10):
        one.scheduler.spawn(wait(), name="wait")
    one.simulation.run_for(1)
    assert len(one.peers.requests) == 1

    def answer(*, is_available: bool) -> None:
        fields = {"is_available": is_available}
        response = messages.encode_response(ApiKey.RECEIVE_RECORDS, 0, 0, fields)
        one.peers.waiting(2)[0].set_result(response[4:])
        one.simulation.run_for(1)

    answer(is_available=True)
    assert woken == [True] * lease_forwarder.WOKEN_MAX
    assert len(one.peers.waiting(2)) == 1  # for the others
    answer(is_available=False)
    assert len(woken) == 10
    assert woken.count(False) == 10 - lease_forwarder.WOKEN_MAX
    assert not one.peers.waiting(2)
