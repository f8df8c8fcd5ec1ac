"""What expressions match: always what is there, and at a cost that neither members nor topics can drive up."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.coordinator.group import topic_resolver
from mansio.broker.coordinator.group.topic_resolver import TopicResolver
from mansio.broker.coordinator.name_pattern import compile_pattern
from mansio.state.consumer_group.group import ConsumerGroup
from support.tiers import examples
from unit.broker.consumer_groups_fixtures import Catalogue, ConsumerBroker, Member

if TYPE_CHECKING:
    from collections.abc import Callable

EXPRESSIONS = ("a.*", ".*1", "[ab][0-4]", "c.", ".*")


@pytest.fixture
def matched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every name that an expression was held against."""
    names: list[str] = []

    def watched(pattern: str) -> Callable[[str], Any]:
        is_match = compile_pattern(pattern)

        def noting(name: str) -> Any:
            names.append(name)
            return is_match(name)

        return noting

    monkeypatch.setattr(topic_resolver, "compile_pattern", watched)
    return names


@pytest.mark.parametrize("seed", range(examples(8, 20)))
def test_expressions_match_what_is_there_whatever_came_and_went_meanwhile(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(topic_resolver, "TOPIC_CHANGES_MAX", 4)
    monkeypatch.setattr(topic_resolver, "PATTERNS_MAX", 3)
    catalogue = Catalogue()
    resolver = TopicResolver(catalogue.live)
    catalogue.listeners = [resolver.update]
    for _ in range(200):
        for _ in range(chance.choice([0, 1, 1, 2, 6])):
            name = chance.choice("abc") + str(chance.randrange(6))
            count = chance.choice([None, 1, 2]) if name in catalogue.live else 1
            catalogue.set(name, count, again=chance.random() < 0.2, internal=name == "c3")
        asked = chance.sample(EXPRESSIONS, chance.randrange(4))
        view = resolver.topics(asked)
        for pattern in asked:
            there = (name for name in catalogue.live if re.fullmatch(pattern, name))
            assert view.matches[pattern] == tuple(sorted(there))
        assert len(view.matches) <= 3
        assert sorted(view.ids) == sorted(catalogue.live)


def test_a_name_is_held_against_an_expression_once_however_often_members_come(matched: list[str]) -> None:
    broker = ConsumerBroker(Catalogue(**{f"t{number}": 1 for number in range(100)}))
    members = [Member(broker, name, None, regex="t.*") for name in "abc"]
    for member in members * 5:
        member.is_full_request = True
        assert member.beat() == 0
    assert len(matched) == 100
    broker.catalogue.set("t100", 1)
    broker.catalogue.set("t0", 2)
    for member in members:
        member.is_full_request = True
        member.beat()
    assert matched[100:] == ["t100"]
    group = broker.groups.store.entries["g"].group
    assert isinstance(group, ConsumerGroup)
    owned = group.stored.resolved_regexes["t.*"].topics
    assert len(owned) == 101
