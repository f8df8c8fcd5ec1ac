"""docs/reference/delivery.md agrees with the code: states and transitions, settings, headers, limits."""

from __future__ import annotations

import re
from typing import Final

import pytest
from tools import generate, share_states

from mansio.config import group_config
from mansio.config.settings import Settings
from mansio.state.share_partition import dead_letters, in_flight, machine
from mansio.state.share_partition.types import ARCHIVED, ARCHIVING
from mansio.wire.internal_records.dead_letter_headers import ID_HEADER, VALUE_OMITTED_HEADER
from support.paths import ROOT

DOCUMENT: Final = (ROOT / "docs/reference/delivery.md").read_text()
ELSEWHERE: Final = {
    "mansio.dedup.ms",
    "mansio.priority.enable",
    "errors.deadletterqueue.group.enable",
    "mansio.blocking",
}
"""Settings of topics, and a module."""


def test_diagram_and_tables_match_the_code() -> None:
    assert generate.documents()["docs/reference/delivery.md"]() == DOCUMENT, "run: make format"
    rows = re.findall(r"^\| ([A-Z]*) ?\|[^|]*\| ([A-Z]+) \|", DOCUMENT, re.MULTILINE)
    named, listed = "", set()
    for state, after in rows:
        named = state or named
        listed.add((named, after))
    names = {state: name for state, (name, _) in share_states.STATES.items()}
    assert listed == {
        (names[one], names[other]) for one, after in in_flight.TRANSITIONS.items() for other in after
    }


def test_a_drawn_transition_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_states, "ARROWS", ((ARCHIVING, 0, "", 0),))
    with pytest.raises(ValueError, match="draws a transition"):
        share_states.diagram()


@pytest.mark.parametrize("after", [frozenset(), frozenset({ARCHIVING, ARCHIVED, 0})], ids=["gone", "new"])
def test_a_transition_without_a_reason_is_an_error(
    after: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(in_flight.TRANSITIONS, ARCHIVING, after)
    with pytest.raises(ValueError, match="differs from TRANSITIONS"):
        share_states.record_states()


def test_every_named_setting_exists() -> None:
    named = set(re.findall(r"`((?:share|mansio|errors|consumer)\.[a-z.]+[a-z])(?:=\w+)?`", DOCUMENT))
    assert named - ELSEWHERE <= group_config.SETTINGS.keys()
    assert len(named) >= 16
    for name in re.findall(r"`((?:group|share|dead)_[a-z_]+)`", DOCUMENT):
        assert name in {*Settings.__dataclass_fields__, "dead_letters_pending", "dead_letter_not_written"}, (
            name
        )


def test_headers_and_limits_match_the_code() -> None:
    assert {ID_HEADER, VALUE_OMITTED_HEADER} <= set(re.findall(r"`(mansio-dlq-[a-z-]+)`", DOCUMENT))
    for limit in (
        dead_letters.DEAD_RANGES_MAX,
        dead_letters.REDRIVES_MAX,
        in_flight.DELIVERIES_MAX,
        machine.REASON_CHARACTERS_MAX,
        Settings.__dataclass_fields__["group_share_max_size"].default,
        Settings.__dataclass_fields__["group_share_max_share_sessions"].default,
    ):
        assert re.search(rf"\b{limit:,}\b", DOCUMENT.partition("## Bounds")[2]), limit
