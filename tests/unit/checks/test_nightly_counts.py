"""What a night counted is added up as stated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.nightly_counts import leave, table

if TYPE_CHECKING:
    from pathlib import Path


def test_lines_of_one_kind_are_added_and_lists_joined_and_the_longest_kept(tmp_path: Path) -> None:
    into = tmp_path / "counts"
    leave(
        "kills",
        into,
        kills=20,
        lost=0,
        fail_over_s=[1.5, 4.0],
        longest_ms=7,
        faults={"cut": 1, "kill": 2},
    )
    leave("soak", into, memory_mib=0.25)
    leave("kills", into, kills=21, lost=0, fail_over_s=[2.0], longest_ms=5, faults={"kill": 1})
    assert table(into) == [
        "kills: times 2, kills 41, lost 0, fail over s 3, median 2.00, longest 4.00, longest ms 7, "
        "faults 4 (cut 1, kill 3)",
        "soak: times 1, memory mib 0.25",
    ]


def test_nothing_is_left_where_the_place_was_not_made(tmp_path: Path) -> None:
    leave("kills", tmp_path / "no" / "counts", kills=20)
    assert not list(tmp_path.iterdir())
