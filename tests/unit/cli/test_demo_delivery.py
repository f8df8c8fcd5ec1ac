"""The checkers of the demo's chapter on delivery must be able to say no, and its picture must show what was."""

from __future__ import annotations

import pytest

from mansio.client import Message
from mansio.client.dead_letters import DeadLetter
from mansio.wire.internal_records.dead_letter_headers import DeadLetterHeaders
from mansio_demo.delivery_demo import Attempt, Attempts, wrong_dead_letters
from mansio_demo.flights import Flight
from mansio_demo.read_gaps import Read, chart_lines, first_reads, gaps, longest_s, moved
from mansio_demo.rebalance_demo import PARTITIONS, RebalanceRun

LIMIT = 3
BACKOFFS_S = (0.25, 0.5)
POISON = 2


def flight(line: int, delay: str) -> Flight:
    value = f"{line},2013,1,1,517,515,{delay},830,819,11,UA,{line},N{line},EWR,IAH,227,1400,5,15,2013"
    return Flight(line, b"N%d" % line, value.encode())


FLIGHTS = [flight(1, "4"), flight(POISON, "NA"), flight(3, "6")]


def good() -> Attempts:
    attempts = Attempts(FLIGHTS, LIMIT, BACKOFFS_S)
    attempts.delays.update({1: 4, 3: 6})
    attempts.add(Attempt(0.0, 1, 1, 0, 0, is_done=True))
    for at, delivery in ((0.0, 1), (0.26, 2), (0.80, 3)):
        attempts.add(Attempt(at, POISON, delivery, 0, 1, is_done=False))
    attempts.add(Attempt(0.3, 3, 1, 0, 2, is_done=True))
    return attempts


def test_a_run_as_it_should_be_is_good_and_its_times_are_reported() -> None:
    attempts = good()
    assert attempts.wrong_before_redrive() == []
    assert (attempts.done, attempts.good_done_at, attempts.mean_min()) == (2, 0.3, 5.0)
    assert attempts.backoffs_of(POISON) == pytest.approx([0.26, 0.54])
    assert attempts.passed(POISON) == (1, 1)
    assert attempts.wrong_after_redrive() == ["UA2 N2 came after the redrive as []"]
    attempts.add(Attempt(2.0, POISON, LIMIT + 1, 0, 1, is_done=True))
    assert (attempts.wrong_after_redrive(), attempts.done) == ([], 3)


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (Attempt(0.1, 1, 2, 0, 0, is_done=True), "UA1 N1 was delivered as [1, 2], not once"),
        (
            Attempt(0.9, POISON, 4, 0, 1, is_done=False),
            "which always fails, was delivered as [1, 2, 3, 4]",
        ),
        (Attempt(0.9, POISON, 3, 0, 1, is_done=False), "was delivered as [1, 2, 3, 3]"),
    ],
)
def test_the_demo_reports_a_wrong_number_of_deliveries(attempt: Attempt, words: str) -> None:
    attempts = good()
    attempts.add(attempt)
    assert words in attempts.wrong_before_redrive()[0]


def test_a_rest_that_was_too_short_a_flight_that_never_came_and_a_wrong_mean_are_reported() -> None:
    attempts = good()
    attempts.found[POISON][1] = attempts.found[POISON][1]._replace(at=0.24)
    del attempts.found[3]
    attempts.delays[1] = 5
    early, missing, mean = attempts.wrong_before_redrive()
    assert "came again after 0.240 s, before 0.25 s" in early
    assert "UA3 N3 was delivered as []" in missing
    assert "5.500 min, not 5.000" in mean
    assert attempts.good_done_at == 0.0


def test_dead_letters_are_one_for_each_flight_and_say_what_they_have_to() -> None:
    message = Message("dlq.t", 0, 0, 0, b"N2", FLIGHTS[1].value)
    headers = DeadLetterHeaders("g", "t", bytes(16), 0, 1, LIMIT, "", "", "m", 0, "id", has_value=True)
    dead_letter = DeadLetter(message, headers)

    def wrong(*dead_letters: DeadLetter) -> list[str]:
        return wrong_dead_letters(dead_letters, [FLIGHTS[1]], "t", "g", LIMIT)

    assert wrong(dead_letter) == []
    assert wrong(dead_letter, dead_letter) == ["there are 2 dead letters of 1 flights, for 1 flights"]
    assert wrong() == ["there are 0 dead letters of 0 flights, for 1 flights"]
    assert (
        "1 dead letters of 1 flights"
        in wrong(dead_letter._replace(message=message._replace(value=b"2,cut")))[0]
    )
    assert wrong(DeadLetter(message, headers._replace(group="h"))) == [
        "a dead letter says ('t', 'h', 3), not ('t', 'g', 3)"
    ]


READS = [
    Read(0.0, 0, 0, "a"),
    Read(0.0, 1, 0, "b"),
    Read(1.0, 0, 1, "a"),
    Read(1.0, 1, 1, "b"),
    Read(2.0, 0, 2, "a"),
    Read(2.9, 1, 2, "d"),
    Read(3.0, 0, 3, "a"),
    Read(3.5, 1, 2, "b"),
    Read(3.6, 1, 3, "d"),
]


def test_gaps_are_between_first_reads_and_the_picture_shows_who_read_what_when() -> None:
    reads = first_reads(reversed(READS))
    assert len(reads) == len(READS) - 1, "a record that was read twice counts once"
    found = gaps(reads, 1.0, 4.0)
    assert [(gap.partition, round(gap.seconds, 3)) for gap in found] == [
        (0, 1.0),
        (1, 1.9),
        (0, 1.0),
        (1, 0.7),
    ]
    assert (longest_s(found, [0]), longest_s(found, [1]), longest_s(found, [2])) == (1.0, 1.9, 0.0)
    assert moved(reads, 1.5) == {1}
    assert chart_lines(reads, 0.0, 4.0, columns=8) == ["  0  a.a.a.a.", "  1  b.b..d.d"]


def joined(pause_s: float = 0.0, move_s: float = 0.0) -> RebalanceRun:
    """Two partitions move to "d" at 1.0, six stay with "a"; a record every 25 ms for 3 s, but for a pause."""
    state = RebalanceRun(begin=0.0, joined=1.0, end=3.0)
    for index in range(PARTITIONS):
        is_moved, offset = index < 2, 0
        for step in range(120):
            at = step / 40
            silent_s = move_s if is_moved else pause_s
            if 1.0 < at < 1.0 + silent_s:
                continue
            state.reads.append(Read(at, index, offset, "d" if is_moved and at > 1.0 else "a"))
            offset += 1
        state.stored[index] = offset
    return state


def test_a_joining_worker_does_not_interrupt_members_that_keep_their_partitions() -> None:
    state = joined()
    assert state.wrong() == []
    assert (state.moved, len(state.stayed)) == ({0, 1}, 6)
    assert (round(state.before_ms), round(state.stayed_ms), round(state.moved_ms)) == (25, 25, 25)
    *rows, mark = state.chart_lines()
    assert [row[5:] for row in rows] == ["a" * 20 + "d" * 40] * 2 + ["a" * 60] * 6
    assert mark.index("^") == 5 + 20


def test_what_a_rebalance_must_not_do_is_reported() -> None:
    (pause,) = joined(pause_s=1.2).wrong()
    assert "a partition that stayed was not read for 1200 ms" in pause
    state = joined()
    state.assignment_changes = [(0.5, 5), (1.2, 0), (1.3, 7), (3.5, 6)]
    (assignment_changes,) = state.wrong()
    assert "partitions [7]" in assignment_changes, "0 moves, and the others were told before, or at the end"
    state = joined()
    state.reads.remove(state.reads[60])
    state.stored[3] += 1
    state.reads.append(state.reads[0])
    missing, twice = state.wrong()
    assert (missing[:10], twice[:10]) == ("2 records ", "1 records ")
    still = joined()
    still.reads = [read._replace(worker="a") for read in still.reads]
    assert "0 partitions moved" in still.wrong()[0]
