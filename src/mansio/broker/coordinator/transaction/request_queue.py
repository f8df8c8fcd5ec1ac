"""Queue of requests to one broker: what arrives while a request is in flight is sent together in the next one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from mansio.errors import MansioError, WireError, error_for_code

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from mansio.ports import Promise, Scheduler

    Outcomes = list[MansioError | None]

Item = TypeVar("Item")


class RequestQueue(ABC, Generic[Item]):
    """Items that wait for a request to one broker. One request is in flight."""

    name = "requests of transactions"
    """Name of the task that sends."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: deque[tuple[Item, Promise[Outcomes]]] = deque()
        self._is_sending = False

    def put(self, item: Item) -> Promise[Outcomes]:
        """Send an item. The result has None or an error for each of its keys; the promise never fails."""
        promise: Promise[Outcomes] = self._scheduler.promise()
        self._waiting.append((item, promise))
        if not self._is_sending:
            self._is_sending = True
            self._scheduler.spawn(self._send_all(), name=self.name)
        return promise

    @abstractmethod
    def group_of(self, item: Item) -> Hashable:
        """A request has at most one item of each group."""

    @abstractmethod
    def keys_of(self, item: Item) -> Sequence[Hashable]:
        """What the response has error codes for."""

    @abstractmethod
    async def request(self, items: Sequence[Item]) -> Mapping[Hashable, int]:
        """Send items in one request; return the error codes by key. Raises `MansioError`, `WireError`."""

    @abstractmethod
    def failure(self, reason: Exception | None) -> MansioError:
        """The error of an item whose request failed, was interrupted (None), or whose response lacks the key."""

    @property
    @abstractmethod
    def items_max(self) -> int:
        """Maximum number of items in a request."""

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                await self._send(self._take())
        finally:
            self._is_sending = False

    def _take(self) -> list[tuple[Item, Promise[Outcomes]]]:
        """Take the waiting items of different groups; others stay for the next request."""
        taken: dict[Hashable, tuple[Item, Promise[Outcomes]]] = {}
        left: deque[tuple[Item, Promise[Outcomes]]] = deque()
        while self._waiting:
            item, promise = self._waiting.popleft()
            group = self.group_of(item)
            if group in taken or len(taken) == self.items_max:
                left.append((item, promise))
            else:
                taken[group] = item, promise
        self._waiting = left
        return list(taken.values())

    async def _send(self, sent: Sequence[tuple[Item, Promise[Outcomes]]]) -> None:
        failure = self.failure(None)
        codes: Mapping[Hashable, int] = {}
        try:
            codes = await self.request([item for item, _ in sent])
        except (MansioError, WireError) as error:
            failure = self.failure(error)
        finally:
            for item, promise in sent:
                found = [codes.get(key) for key in self.keys_of(item)]
                errors = [
                    failure if code is None else error_for_code(code) if code else None for code in found
                ]
                if not promise.done():
                    promise.set_result(errors)
