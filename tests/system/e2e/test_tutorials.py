"""The tutorials: every block is run as it stands, in order, and prints what the page shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from support.documents import examples, lines_to_compare
from support.paths import ROOT
from system.e2e.test_examples import started

if TYPE_CHECKING:
    from pathlib import Path

PAGES = ("events", "work-queue")
LINES_MAX = 270
BLOCK = re.compile(
    r"^(?P<mark><!-- example: .*\n)?```(?:sh|python)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
INSTALLS = "python3 -m venv .venv && . .venv/bin/activate && pip install "


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_tutorial_but_its_installation_is_an_example(page: str) -> None:
    text = (ROOT / f"docs/tutorial/{page}.md").read_text()
    not_run = [block["code"] for block in BLOCK.finditer(text) if not block["mark"]]
    assert len(not_run) == 1, not_run
    assert not_run[0].startswith(INSTALLS), not_run
    assert len(text.splitlines()) <= LINES_MAX


@pytest.mark.full
def test_the_tutorial_about_events_can_be_followed(tmp_path: Path) -> None:
    page = "docs/tutorial/events.md"
    found = examples(page)
    # Which partition is read first is open, and with it what the first three payments are.
    first, rest = found["first-three"].shown, found["rest"].shown
    assert first is not None
    assert rest is not None
    for name in ("first-three", "rest"):
        found[name] = found[name]._replace(shown=None)
    with started(tmp_path, page) as bench:
        printed = bench.follow(found, unordered=["publish"])
    *payments, group, heading, _, _, _ = printed["first-three"]
    shown = lines_to_compare(first)
    assert [group, heading] == shown[3:5]
    assert len(payments) == 3
    assert sorted(payments + printed["rest"]) == sorted(shown[:3] + lines_to_compare(rest))
    assert sum(int(line.split()[4]) for line in printed["first-three"][5:]) == 2


@pytest.mark.full
def test_the_tutorial_about_a_work_queue_can_be_followed(tmp_path: Path) -> None:
    page = "docs/tutorial/work-queue.md"
    with started(tmp_path, page) as bench:
        printed = bench.follow(examples(page))
    assert printed["schedule"].count("next TIME") == 5
