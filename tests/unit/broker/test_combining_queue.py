"""`CombiningQueue`: every item is sent at most once, in the order of its key, and every waiter gets an outcome."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from mansio.broker.routing import combining_queue
from mansio.broker.routing.combining_queue import CombiningQueue
from mansio.errors import ConnectionLost, MansioError, WireError
from mansio.testing.scheduler import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SEED = 35
NO_PEERS: Any = None
"""The queue of this test answers its requests itself."""
ITEMS_MAX = 7
SIZE_MAX = 20


class Sent(NamedTuple):
    number: int
    key: int | None = None
    kind: int = 0
    size: int = 1


class Queue(CombiningQueue[Sent, str]):
    items_max = ITEMS_MAX
    size_max = SIZE_MAX

    def __init__(
        self, simulation: Simulation, answer: Callable[[list[Sent]], list[str]] | None = None
    ) -> None:
        self.scheduler = simulation.scheduler("broker")
        super().__init__(2, NO_PEERS, self.scheduler)
        self.answer = answer or (lambda items: [f"answer {each.number}" for each in items])
        self.requests: list[list[Sent]] = []
        self.in_flight = 0

    def order_key(self, item: Sent) -> int | None:
        return item.key

    def kind_of(self, item: Sent) -> int:
        return item.kind

    def size_of(self, item: Sent) -> int:
        return item.size

    def failure(self, item: Sent, reason: Exception | None) -> str:
        return f"failure {item.number} {type(reason).__name__}"

    async def request(self, items: Sequence[Sent]) -> list[str]:
        assert not self.in_flight
        self.in_flight += 1
        self.requests.append(list(items))
        try:
            await self.scheduler.sleep(10)
            return self.answer(list(items))
        finally:
            self.in_flight -= 1


def outcomes(promises: list[Any]) -> list[str]:
    assert all(each.done() for each in promises)
    return [each.result() for each in promises]


@pytest.mark.parametrize("has_keys", [True, False])
def test_items_are_sent_once_within_the_bounds_and_in_the_order_of_their_key(has_keys: bool) -> None:
    random = Random(SEED)
    simulation = Simulation()
    queue = Queue(simulation)
    items, promises = [], []
    for number in range(400):
        key = random.randrange(5) if has_keys else None
        items.append(Sent(number, key, random.randrange(2), random.choice((1, 5, SIZE_MAX + 5))))
        promises.append(queue.put(items[-1]))
        simulation.run_for(random.choice((0, 0, 0, 4, 25)))
    simulation.run_for(60_000)

    assert outcomes(promises) == [f"answer {each.number}" for each in items]
    sent = [each for request in queue.requests for each in request]
    assert Counter(sent) == Counter(items)
    for key in {each.key for each in items}:
        assert [each for each in sent if each.key == key] == [each for each in items if each.key == key]
    for request in queue.requests:
        assert len(request) <= ITEMS_MAX
        assert len({each.kind for each in request}) == 1
        assert len(request) == 1 or sum(each.size for each in request) <= SIZE_MAX
        assert not has_keys or len({each.key for each in request}) == len(request)
    assert len(queue.requests) < len(items)  # items were combined


@pytest.mark.parametrize("error", [ConnectionLost("lost"), WireError("damaged")])
def test_a_failed_request_fails_its_items_and_not_those_behind_it(error: MansioError | WireError) -> None:
    def answer(items: list[Sent]) -> list[str]:
        if items[0].number == 0:
            raise error
        return ["stored"] * len(items)

    simulation = Simulation()
    queue = Queue(simulation, answer)
    promises = [queue.put(Sent(0))]
    simulation.run_for(1)
    promises += [queue.put(Sent(number)) for number in (1, 2)]
    simulation.run_for(1_000)
    assert outcomes(promises) == [f"failure 0 {type(error).__name__}", "stored", "stored"]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_response_with_another_number_of_results_fails_all_items(count: int) -> None:
    simulation = Simulation()
    queue = Queue(simulation, lambda _: ["stored"] * count)
    promises = [queue.put(Sent(number)) for number in (0, 1)]
    simulation.run_for(1_000)
    assert outcomes(promises) == [f"failure {number} CoordinatorNotAvailable" for number in (0, 1)]


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("interruption", [Interrupted, ZeroDivisionError])
def test_an_interruption_completes_every_waiter_and_the_queue_goes_on(
    interruption: type[BaseException],
) -> None:
    def answer(items: list[Sent]) -> list[str]:
        if items[0].number == 0:
            raise interruption
        return ["stored"] * len(items)

    simulation = Simulation()
    queue = Queue(simulation, answer)
    promises = [queue.put(Sent(0))]
    simulation.run_for(1)
    promises += [queue.put(Sent(number)) for number in (1, 2)]
    with pytest.raises(interruption):
        simulation.run_for(1_000)
    assert outcomes(promises) == [f"failure {number} NoneType" for number in (0, 1, 2)]
    later = queue.put(Sent(3))
    simulation.run_for(1_000)
    assert outcomes([later]) == ["stored"]


def test_an_item_beyond_the_bound_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining_queue, "WAITING_MAX", 5)
    simulation = Simulation()
    queue = Queue(simulation)
    promises = [queue.put(Sent(number)) for number in range(6)]
    assert outcomes(promises[5:]) == ["failure 5 CoordinatorNotAvailable"]
    simulation.run_for(1_000)
    assert outcomes(promises[:5]) == [f"answer {number}" for number in range(5)]
