"""The greatest set of compatible pairs of two schemas that may be recursive: a pair is assumed to be compatible until a
requirement fails, and each pair that relied on it is then evaluated again."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from mansio.serde.errors import InvalidSchema

if TYPE_CHECKING:
    from collections.abc import Callable

Reader = TypeVar("Reader")
Writer = TypeVar("Writer")


class Pair(Generic[Reader, Writer]):
    """A part of the reader's schema and one of the writer's, whether they are compatible as far as is known, and the
    pairs that rely on it."""

    __slots__ = ("is_compatible", "reader", "users", "writer")

    def __init__(self, reader: Reader, writer: Writer) -> None:
        self.reader = reader
        self.writer = writer
        self.is_compatible = True
        self.users: list[Pair[Reader, Writer]] = []


class Pairs(Generic[Reader, Writer]):
    """The pairs that were met, at most `pairs_max`. `evaluate` returns whether a pair is compatible as far as is known
    of those that it relies on, each of which it names with `relies_on`."""

    def __init__(self, evaluate: Callable[[Pair[Reader, Writer]], bool], pairs_max: int) -> None:
        self._evaluate = evaluate
        self._pairs_max = pairs_max
        self._pairs: dict[tuple[int, ...], Pair[Reader, Writer]] = {}
        self._pending: deque[Pair[Reader, Writer]] = deque()

    def pair(self, key: tuple[int, ...], reader: Reader, writer: Writer) -> Pair[Reader, Writer]:
        """Return the pair of a key. Raises `InvalidSchema` if there are too many."""
        pair = self._pairs.get(key)
        if pair is None:
            if len(self._pairs) == self._pairs_max:
                raise InvalidSchema(
                    f"the schemas are too large to be compared: more than {self._pairs_max:,} pairs of types"
                )
            pair = self._pairs[key] = Pair(reader, writer)
            self._pending.append(pair)
        return pair

    @staticmethod
    def relies_on(user: Pair[Reader, Writer], pair: Pair[Reader, Writer]) -> bool:
        """Return whether a pair that `user` relies on is compatible, as far as is known."""
        if pair.is_compatible:
            pair.users.append(user)
        return pair.is_compatible

    def evaluate_pending(self) -> None:
        """Evaluate all pairs that are not evaluated, and those that relied on one that is not compatible."""
        while self._pending:
            pair = self._pending.popleft()
            if pair.is_compatible and not self._evaluate(pair):
                pair.is_compatible = False
                self._pending.extend(pair.users)
                pair.users.clear()
