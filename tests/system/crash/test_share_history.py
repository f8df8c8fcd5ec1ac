"""Tests of the checker of deliveries: it finds each planted violation, and none in a correct history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.share_history import Breach, Place, ShareHistory

if TYPE_CHECKING:
    from collections.abc import Callable

LOCK_MS = 100.0


class Story:
    """A history of one record, written step by step: each step takes a while."""

    def __init__(self) -> None:
        self.history = ShareHistory()
        self.now_ms = 0.0

    def gets(self, member: str, count: int) -> Story:
        self.history.given(
            member, 0, 0, 0, count, sent_ms=self.now_ms + 1, got_ms=self.now_ms + 2, lock_ms=LOCK_MS
        )
        return self.later(3)

    def acks(self, member: str, kind: str, *, answered: bool = True) -> Story:
        self.history.acks(member, 0, [0], kind, self.now_ms)
        if answered:
            self.history.acknowledged(0, [0], kind, self.now_ms + 1)
        return self.later(2)

    def redrives(self, redrive_id: str, offered: int) -> Story:
        self.history.asks_redrive(redrive_id, Place(0, 0))
        self.history.redriven(redrive_id, Place(0, 0), offered)
        return self

    def later(self, ms: float = LOCK_MS) -> Story:
        self.now_ms += ms
        return self

    def leaves(self, member: str) -> Story:
        self.history.gone(member, self.now_ms)
        return self

    def restarts(self) -> Story:
        self.history.restarted(self.now_ms, self.now_ms + 90, LOCK_MS)
        return self.later(110)

    def ends(self, dead_letters: int = 0) -> Story:
        self.history.finish({0: 1}, [Place(0, 0)] * dead_letters)
        return self


@pytest.mark.parametrize(
    "tell",
    [
        lambda story: story.gets("a", 1).later().gets("b", 2).acks("b", "accept").ends(),
        lambda story: story.gets("a", 1).acks("a", "release").gets("b", 2).acks("b", "reject").ends(1),
        lambda story: story.gets("a", 1).leaves("a").gets("b", 2).acks("b", "accept").ends(),
        lambda story: story.gets("a", 1).restarts().later().gets("b", 2).acks("b", "accept").ends(),
        lambda story: story.gets("a", 1).acks("a", "reject").redrives("r", 1).redrives("r", 0).gets("b", 2)
        .acks("b", "accept").ends(1),
        lambda story: story.gets("a", 1).acks("a", "accept", answered=False).later().gets("b", 2)
        .acks("b", "accept").ends(),
    ],
)  # fmt: skip
def test_allowed_histories_are_accepted(tell: Callable[[Story], Story]) -> None:
    assert tell(Story()).history.breach is None


@pytest.mark.parametrize(
    ("how", "tell"),
    [
        ("accepted", lambda story: story.gets("a", 1).acks("a", "accept").gets("b", 2)),
        ("rejected", lambda story: story.gets("a", 1).acks("a", "reject").gets("b", 2)),
        ("has it for", lambda story: story.gets("a", 1).gets("b", 2)),
        ("has it for", lambda story: story.gets("a", 1).restarts().gets("b", 2)),
        ("before", lambda story: story.gets("a", 3).later().gets("b", 2)),
        ("too", lambda story: story.gets("a", 1).later().gets("b", 1)),
        ("twice", lambda story: story.gets("a", 1).acks("a", "reject").redrives("r", 1).redrives("r", 1)),
        ("lost", lambda story: story.gets("a", 1).ends()),
        ("no dead letter", lambda story: story.gets("a", 1).acks("a", "accept", answered=False)
         .acks("a", "reject").ends()),
        ("was accepted and has", lambda story: story.gets("a", 1).acks("a", "accept").ends(1)),
        ("2 dead letters", lambda story: story.gets("a", 1).acks("a", "reject").ends(2)),
    ],
)  # fmt: skip
def test_violations_are_found(how: str, tell: Callable[[Story], Story]) -> None:
    with pytest.raises(Breach, match=how):
        tell(Story())
