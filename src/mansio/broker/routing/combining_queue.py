"""Queue of items for one broker: what arrives while a request is in flight is sent together in the next one.

Invariants:
* One request is in flight.
* Every item is sent at most once, and its promise is completed with one outcome: that of the response, or a failure if
  the request failed, its response is invalid, the sending task was interrupted, or too many items wait.
* Items with the same order key are sent in the order of arrival.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from mansio.errors import CoordinatorNotAvailable, MansioError, WireError
from mansio.ports import complete

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from mansio.ports import Peers, Promise, Scheduler

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

WAITING_MAX = 10_000
"""Maximum number of items that wait for a request to one broker."""


class CombiningQueue(ABC, Generic[Item, Outcome]):
    """Items that wait for a request to one broker. All methods run on the broker's event loop."""

    name = "combined requests"
    """Name of the task that sends."""
    items_max = 1_000
    """Maximum number of items in a request."""
    size_max = 0
    """Maximum sum of the sizes of the items in a request, by `size_of`. A larger item is sent alone."""

    def __init__(self, node_id: int, peers: Peers, scheduler: Scheduler) -> None:
        """`node_id`: the broker that gets the requests; `peers`: unordered connections to other brokers."""
        self._node_id = node_id
        self._peers = peers
        self._scheduler = scheduler
        self._waiting: deque[tuple[Item, Promise[Outcome]]] = deque()
        self._is_sending = False

    def put(self, item: Item) -> Promise[Outcome]:
        """Send an item in one of the next requests; return its outcome. The promise never fails."""
        promise: Promise[Outcome] = self._scheduler.promise()
        if len(self._waiting) >= WAITING_MAX:
            full = CoordinatorNotAvailable(f"{WAITING_MAX} items wait for a request")
            promise.set_result(self.failure(item, full))
            return promise
        self._waiting.append((item, promise))
        if not self._is_sending:
            self._is_sending = True
            self._scheduler.spawn(self._send_all(), name=self.name)
        return promise

    @abstractmethod
    async def request(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Send items in one request; return the outcome of each. Raises `MansioError`, `WireError`."""

    @abstractmethod
    def failure(self, item: Item, reason: Exception | None, /) -> Outcome:
        """Return the outcome of an item without a response. `reason`: None if the task was interrupted."""

    def order_key(self, _item: Item, /) -> Hashable | None:
        """Return a key of which a request has at most one item. None: all items are sent strictly in order."""
        return None

    def kind_of(self, _item: Item, /) -> Hashable:
        """Return what all items of a request have in common."""
        return None

    def size_of(self, _item: Item, /) -> int:
        """Return the size of an item, of which `size_max` bounds the sum."""
        return 0

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                await self._send(self._take())
        finally:
            self._is_sending = False
            interrupted, self._waiting = self._waiting, deque()
            self._fail(interrupted, None)

    def _take(self) -> list[tuple[Item, Promise[Outcome]]]:
        """Take the items of the next request; others stay."""
        waiting = self._waiting
        first = waiting[0][0]
        kind, size = self.kind_of(first), 0
        taken: list[tuple[Item, Promise[Outcome]]] = []
        passed: list[tuple[Item, Promise[Outcome]]] = []
        keys: set[Hashable] = set()
        while waiting and len(taken) < self.items_max:
            item = waiting[0][0]
            key = self.order_key(item)
            size_after = size + self.size_of(item)
            fits = self.kind_of(item) == kind and (size_after <= self.size_max or not taken)
            if key is None and not fits:
                break
            if key in keys or not fits:
                passed.append(waiting.popleft())
            else:
                size = size_after
                taken.append(waiting.popleft())
            if key is not None:
                keys.add(key)
        waiting.extendleft(reversed(passed))
        return taken

    async def _send(self, sent: Sequence[tuple[Item, Promise[Outcome]]]) -> None:
        try:
            outcomes = await self.request([item for item, _ in sent])
            if len(outcomes) != len(sent):
                raise CoordinatorNotAvailable(f"{len(outcomes)} results for {len(sent)} entries")
        except (MansioError, WireError) as error:
            self._fail(sent, error)
        else:
            for (_, promise), outcome in zip(sent, outcomes, strict=True):
                complete(promise, outcome)
        finally:
            self._fail(sent, None)  # interrupted

    def _fail(self, items: Sequence[tuple[Item, Promise[Outcome]]], reason: Exception | None) -> None:
        for item, promise in items:
            complete(promise, self.failure(item, reason))
