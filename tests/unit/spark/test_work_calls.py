"""Calls of a user's function: each row has one outcome, whatever rows raise, are rejected, or kill their process."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.types import (
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from mansio.spark.spark_versions import to_arrow_type
from mansio.spark.work.apply import Isolation, evaluate
from mansio.spark.work.calls import Call, Died, calls_of, run_isolated
from mansio.spark.work.errors import Reject, Retry, RowErrors, row_error
from mansio.spark.work.evaluation import Function
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULT_TYPE = pa.struct([("doubled", pa.int64())])
GOOD, RAISES, REJECTS, RETRIES, WRONG, DIES = "good", "raises", "rejects", "retries", "wrong", "dies"
NEVER_ISOLATED = Isolation("never", None, None)
ERRORS = {
    RAISES: ("ValueError", "retry", -1),
    REJECTS: ("Reject", "reject", -1),
    RETRIES: ("Retry", "retry", 7),
}


def behave(what: str, number: int) -> Any:
    if what == RAISES:
        raise ValueError(number)
    if what == REJECTS:
        raise Reject("no")
    if what == RETRIES:
        raise Retry("later", delay_ms=7)
    return "x" if what == WRONG else 2 * number


def rows_of(behaviours: Sequence[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"what": behaviours, "number": [*range(len(behaviours))]})


@settings(max_examples=examples(40, 300))
@given(st.lists(st.sampled_from((GOOD, RAISES, REJECTS, RETRIES, WRONG)), max_size=20))
def test_each_row_has_its_result_or_its_error_and_is_called_once(behaviours: list[str]) -> None:
    called: Counter[int] = Counter()

    def function(row: Any) -> Any:
        called[row.number] += 1
        return behave(row.what, row.number)

    found = evaluate(
        rows_of(behaviours),
        Function(function, "row", RESULT_TYPE, "retry"),
        RESULT_TYPE,
        1,
        NEVER_ISOLATED,
        is_repeated=False,
    )
    assert found.results.to_pylist() == [
        {"doubled": 2 * number} if what == GOOD else None for number, what in enumerate(behaviours)
    ]
    assert found.errors.keys() == {number for number, what in enumerate(behaviours) if what != GOOD}
    for number, error in found.errors.items():
        if behaviours[number] in ERRORS:
            assert (error.kind, error.action, error.delay_ms) == ERRORS[behaviours[number]]
        else:
            assert error.action == "retry"
    assert called == Counter(range(len(behaviours)))


@settings(max_examples=examples(40, 300))
@given(st.lists(st.sampled_from((GOOD, RAISES)), min_size=1, max_size=20), st.integers(1, 7), st.booleans())
def test_a_call_of_several_rows_fails_as_a_whole_or_names_its_rows(
    behaviours: list[str], rows_per_call: int, names_rows: bool
) -> None:
    called: Counter[int] = Counter()

    def function(rows: pa.RecordBatch) -> pa.Table:
        numbers = rows.column("number").to_pylist()
        called.update(numbers)
        failed = [index for index, what in enumerate(rows.column("what").to_pylist()) if what == RAISES]
        if failed and not names_rows:
            raise ValueError("some")
        results = pa.table({"doubled": [2 * number for number in numbers]})
        if failed:
            raise RowErrors({index: ValueError(index) for index in failed}, results)
        return results

    found = evaluate(
        rows_of(behaviours),
        Function(function, "arrow", RESULT_TYPE, "reject"),
        RESULT_TYPE,
        rows_per_call,
        NEVER_ISOLATED,
        is_repeated=False,
    )
    failed = set()
    for call in calls_of(len(behaviours), rows_per_call):
        bad = [at for at in range(call.first, call.end) if behaviours[at] == RAISES]
        failed |= {*bad} if names_rows else {*range(call.first, call.end)} if bad else set()
    assert found.errors.keys() == failed
    assert {error.action for error in found.errors.values()} <= {"reject"}
    assert [each is None for each in found.results.to_pylist()] == [
        number in failed for number in range(len(behaviours))
    ]
    assert called == Counter(range(len(behaviours)))


@settings(max_examples=examples(60, 500))
@given(st.lists(st.booleans(), max_size=30), st.integers(1, 9))
def test_rows_that_kill_their_process_are_found_and_the_others_are_called_once(
    kills: list[bool], rows_per_call: int
) -> None:
    called: Counter[int] = Counter()
    processes = 0

    def run(waiting: Sequence[Call]) -> tuple[list[Call], Died | None]:
        nonlocal processes
        processes += 1
        done: list[Call] = []
        for call in waiting:
            if any(kills[call.first : call.end]):
                return done, Died("killed")
            called.update(range(call.first, call.end))
            done.append(call)
        return done, None

    outcomes = [*run_isolated(calls_of(len(kills), rows_per_call), run)]
    covered = [at for each in outcomes for at in range(each.call.first, each.call.end)]
    assert covered == [*range(len(kills))]
    dead = [each.call.first for each in outcomes if each.died is not None]
    assert dead == [at for at, kill in enumerate(kills) if kill]
    assert called == Counter(at for at, kill in enumerate(kills) if not kill)
    assert processes <= 2 * sum(kills) * (1 + rows_per_call.bit_length()) + 1


@pytest.mark.parametrize(
    ("decision", "expected"),
    [("reject", ("reject", -1)), ("retry", ("retry", -1)), (500, ("retry", 500)), ("?", ("retry", -1))],
)
def test_a_function_of_the_exception_decides_what_happens(
    decision: str | int, expected: tuple[str, int]
) -> None:
    error = row_error(KeyError("k"), lambda _: decision)
    assert (error.kind, error.action, error.delay_ms) == ("KeyError", *expected)


def test_a_decision_that_fails_keeps_the_record() -> None:
    def fails(_: BaseException) -> str:
        raise RuntimeError("broken")

    error = row_error(ValueError("v" * 5_000), fails)
    assert (error.kind, error.action, len(error.message)) == ("ValueError", "retry", 1_000)


def results_of(function: Any, rows: pa.RecordBatch, kind: str = "row", **types: pa.DataType) -> Any:
    result_type = pa.struct(list((types or {"doubled": pa.int64()}).items()))
    called = Function(function, kind, result_type, "retry")
    return evaluate(rows, called, result_type, 100, NEVER_ISOLATED, is_repeated=False)


def test_a_row_of_named_fields_is_not_taken_by_position() -> None:
    found = results_of(lambda _: Row(b=2, a=1), rows_of([GOOD]), a=pa.int64(), b=pa.int64())
    assert found.results.to_pylist() == [{"a": 1, "b": 2}]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "message"),
    [(ValueError("\ud800"), "?"), (Unspeakable(), "(no message: RuntimeError)")],
)
def test_an_exception_without_a_message_that_can_be_stored_fails_its_row_only(
    error: Exception, message: str
) -> None:
    def function(row: Any) -> int:
        if row.number == 1:
            raise error
        return int(row.number)

    found = results_of(function, rows_of([GOOD] * 3))
    assert found.errors.keys() == {1}
    assert found.errors[1].message == message


def test_a_value_that_python_cannot_have_fails_its_row_only() -> None:
    times = pa.array([0, 2**60, 1], pa.timestamp("us"))
    found = results_of(lambda row: row.at.year, pa.RecordBatch.from_arrays([times], ["at"]))
    assert found.errors.keys() == {1}
    assert found.results.to_pylist()[0] == {"doubled": 1970}


def test_row_errors_of_a_row_that_is_not_there_fail_the_call() -> None:
    def function(rows: pa.RecordBatch) -> pa.Table:
        raise RowErrors({-1: ValueError()}, pa.table({"doubled": [0] * rows.num_rows}))

    assert results_of(function, rows_of([GOOD] * 2), "arrow").errors.keys() == {0, 1}


def test_values_of_failed_rows_do_not_matter() -> None:
    def function(rows: Any) -> Any:
        raise RowErrors({1: ValueError("bad")}, rows["number"].astype(object).where(rows.index != 1, "x"))

    found = results_of(function, rows_of([GOOD] * 3), "pandas")
    assert found.errors.keys() == {1}
    assert [each and each["doubled"] for each in found.results.to_pylist()] == [0, None, 2]


def test_records_that_were_delivered_before_are_called_alone() -> None:
    sizes: list[int] = []

    def function(rows: pa.RecordBatch) -> pa.Table:
        sizes.append(rows.num_rows)
        if "raises" in rows.column("what").to_pylist():
            raise ValueError("some")
        return pa.table({"doubled": rows.column("number")})

    counts = pa.array([1, 1, 4, 4, 4, 1], pa.int32())
    rows = rows_of([GOOD, GOOD, GOOD, RAISES, GOOD, GOOD]).append_column("delivery_count", counts)
    found = results_of(function, rows, "arrow")
    assert found.errors.keys() == {3}
    assert sizes == [2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (TimestampType(), pa.timestamp("us", tz="UTC")),
        (MapType(StringType(), LongType()), pa.map_(pa.string(), pa.int64())),
    ],
)
def test_types_of_spark_have_types_of_arrow(kind: DataType, expected: pa.DataType) -> None:
    (found,) = to_arrow_type(StructType([StructField("a", kind)]))
    assert found.type == expected


def test_a_map_is_a_dictionary() -> None:
    maps = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))
    found = results_of(lambda row: row.of["a"], pa.RecordBatch.from_arrays([maps], ["of"]))
    assert found.results.to_pylist() == [{"doubled": 1}]
