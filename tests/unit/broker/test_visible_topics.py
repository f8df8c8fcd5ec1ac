"""Topics as the members of a group may see them: what is resolved, when, and by which member."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.coordinator.group import visible_topics
from mansio.broker.coordinator.group.visible_topics import Viewer, VisibleTopics
from mansio.state.consumer_group.types import Topics

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest


class Member:
    """A viewer that may describe some topics, and counts how often it is asked."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked = 0

    def at(self, revision: int) -> Viewer:
        return Viewer(revision, self._visible)

    def _visible(self, names: Sequence[str]) -> list[str]:
        self.asked += 1
        return [name for name in names if name in self.names]


def topics(*names: str) -> Topics:
    """The existing topics, which the expression `.*` matches."""
    ids = {name: name.encode() for name in names}
    return Topics(ids, dict.fromkeys(ids.values(), 1), {".*": names, "a": tuple({*names} & {"a"})})


def test_as_long_as_nothing_changes_no_member_is_asked_and_the_object_stays() -> None:
    base, member = topics("a", "b"), Member("a")
    found = VisibleTopics(base)
    first = found.update(base, ".*", member.at(1))
    assert first.matches == {".*": ("a",)}
    assert all(found.update(base, ".*", member.at(1)) is first for _ in range(3))
    assert found.update(base) is first
    assert member.asked == 1
    assert found.update(base, ".*", member.at(2)) is first, "the same topics after a change of other ACLs"
    assert member.asked == 2


def test_a_deleted_topic_leaves_at_once_and_a_new_one_waits_for_a_member() -> None:
    base, member = topics("a", "b"), Member("a", "b", "c")
    found = VisibleTopics(base)
    found.update(base, ".*", member.at(1))
    changed = topics("b", "c")
    assert found.update(changed).matches == {".*": ("b",)}
    assert found.update(changed, ".*", member.at(1)).matches == {".*": ("b", "c")}


def test_each_expression_is_resolved_by_its_own_members() -> None:
    base = topics("a", "b")
    found = VisibleTopics(base)
    found.update(base, ".*", Member("a", "b").at(1))
    assert found.update(base, "a", Member().at(1)).matches == {".*": ("a", "b"), "a": ()}


def test_the_results_of_a_group_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible_topics, "PATTERNS_MAX", 2)
    names = {str(number): ("t",) for number in range(5)}
    base = Topics({"t": b"t"}, {b"t": 1}, names)
    found = VisibleTopics(base)
    for pattern in names:
        found.update(base, pattern, Member("t").at(1))
    assert found.topics.matches == {"3": ("t",), "4": ("t",)}
