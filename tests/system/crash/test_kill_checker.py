"""Tests of the checker of crash tests: it finds each kind of planted violation, and none in a correct history."""

from __future__ import annotations

import pytest

from system.crash.checker import Acknowledged, History, Kind, Seen, check, sender_of, value_of


def sound() -> tuple[History, list[Seen]]:
    """Two partitions; producer `a` is idempotent, `b` is not and has left one duplicate."""
    order = [(0, "a", 0), (1, "a", 1), (0, "b", 0), (0, "b", 0), (0, "a", 2), (1, "b", 1), (0, "a", 3)]
    ends = [0, 0]
    final = []
    for partition, producer, number in order:
        final.append(Seen(partition, ends[partition], value_of(producer, number)))
        ends[partition] += 1
    history = History()
    history.sent.update({"a": 5, "b": 2})  # number 4 of `a` was sent and never acknowledged
    history.acknowledged = [Acknowledged(*one) for one in final if one.offset != 1 or one.partition != 0]
    history.reads["reader"] = [one for one in final if one.partition == 0][:4]
    history.commits = {0: (2, 4), 1: (1, 1)}
    return history, final


def kinds(history: History, final: list[Seen], committed: dict[int, int] | None = None) -> set[Kind]:
    verdict = check(history, final, idempotent=["a"], committed=committed or {0: 3, 1: 1})
    return {one.kind for one in verdict.violations}


def test_sound_history_passes_and_its_allowed_duplicate_is_counted() -> None:
    history, final = sound()
    verdict = check(history, final, idempotent=["a"], committed={0: 4, 1: 1})
    assert verdict.violations == []
    assert (verdict.acknowledged, verdict.stored, verdict.duplicates) == (6, 7, 1)


def test_acknowledged_record_cut_off_the_end_is_lost() -> None:
    history, final = sound()
    assert kinds(history, final[:-1]) == {Kind.LOST}


def test_record_acknowledged_without_its_place_is_anywhere_in_its_partition() -> None:
    history, final = sound()
    history.acknowledged = [one._replace(offset=None) for one in history.acknowledged]
    assert kinds(history, final) == set()
    assert kinds(history, final[:-1]) == {Kind.LOST}
    history.acknowledged[-1] = history.acknowledged[-1]._replace(partition=1)
    assert kinds(history, final) == {Kind.LOST}


def test_acknowledged_record_at_another_offset_is_moved() -> None:
    history, final = sound()
    last = final.pop()
    final += [Seen(0, last.offset, value_of("a", 4)), Seen(0, last.offset + 1, last.value)]
    assert kinds(history, final) == {Kind.MOVED, Kind.OVERWRITTEN, Kind.REORDERED}


def test_offset_given_to_another_value_is_overwritten() -> None:
    history, final = sound()
    final[-1] = Seen(0, final[-1].offset, value_of("a", 4))
    assert kinds(history, final) == {Kind.OVERWRITTEN}


def test_offset_promised_to_two_values() -> None:
    history, final = sound()
    history.acknowledged.append(Acknowledged(0, final[-1].offset, value_of("a", 4)))
    assert Kind.TWICE_PROMISED in kinds(history, final)


def test_duplicate_of_an_idempotent_producer() -> None:
    history, final = sound()
    final.append(Seen(0, final[-1].offset + 1, final[-1].value))
    assert kinds(history, final) == {Kind.DUPLICATE}


def out_of_order(producer: str) -> tuple[History, list[Seen]]:
    history = History()
    history.sent[producer] = 2
    return history, [Seen(0, 0, value_of(producer, 1)), Seen(0, 1, value_of(producer, 0))]


def test_records_of_an_idempotent_producer_out_of_order() -> None:
    assert kinds(*out_of_order("a"), {0: 0}) == {Kind.REORDERED}


def test_record_of_another_producer_may_be_overtaken_until_it_is_acknowledged() -> None:
    history, final = out_of_order("b")
    history.acknowledged = [Acknowledged(*one) for one in final]
    assert kinds(history, final, {0: 0}) == set()
    history.acknowledged.reverse()
    assert kinds(history, final, {0: 0}) == {Kind.REORDERED}


@pytest.mark.parametrize("value", [b"", b"a/0/zz", b"\0" * 60, value_of("c", 0), value_of("a", 5)])
def test_value_that_was_not_sent(value: bytes) -> None:
    history, final = sound()
    final.append(Seen(0, final[-1].offset + 1, value))
    assert kinds(history, final) == {Kind.INVENTED}


def test_hole_in_the_log() -> None:
    history, final = sound()
    final.append(Seen(0, final[-1].offset + 2, value_of("a", 4)))
    assert kinds(history, final) == {Kind.HOLE}


def test_record_that_was_read_and_is_gone() -> None:
    history, final = sound()
    history.reads["reader"].append(Seen(1, 0, value_of("a", 1)))
    history.reads["reader"].append(Seen(1, 1, value_of("b", 1)))
    history.reads["reader"].append(Seen(1, 2, value_of("a", 4)))
    assert kinds(history, final) == {Kind.READ_THEN_GONE}


def test_record_that_was_read_and_has_changed() -> None:
    history, final = sound()
    history.reads["reader"][-1] = history.reads["reader"][-1]._replace(value=value_of("a", 4))
    assert kinds(history, final) == {Kind.READ_THEN_CHANGED}


def test_poll_that_went_back() -> None:
    history, final = sound()
    history.reads["reader"].append(history.reads["reader"][0])
    assert kinds(history, final) == {Kind.POLL_WENT_BACK}


def test_poll_that_skipped() -> None:
    history, final = sound()
    del history.reads["reader"][1]
    assert kinds(history, final) == {Kind.POLL_SKIPPED}


@pytest.mark.parametrize("there", [0, 1, 5])
def test_committed_offset_lost_or_never_tried(there: int) -> None:
    history, final = sound()
    assert kinds(history, final, {0: there, 1: 1}) == {Kind.COMMIT_LOST}


def test_values_name_their_sender_and_a_flipped_bit_is_noticed() -> None:
    value = value_of("idempotent-1", 123_456)
    assert sender_of(value) == ("idempotent-1", 123_456)
    assert sender_of(value[:-1] + bytes((value[-1] ^ 1,))) is None
    assert len({value_of("a", number) for number in range(1000)}) == 1000
