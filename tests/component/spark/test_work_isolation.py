"""A function that kills its process, takes too much memory or hangs costs its own row only, in real processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mansio.spark.work.apply import Isolation, evaluate
from mansio.spark.work.evaluation import Evaluated, Function
from support.machine import scaled
from support.waiting import wait_until

RESULT_TYPE = pa.struct([("doubled", pa.int64())])
ALWAYS = Isolation("always", None, None)


def killer(row: Any) -> int:
    if row.what == "exit":
        os._exit(3)
    if row.what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if row.what == "memory":
        return len(b"x" * (1 << 30))
    if row.what == "hang":
        time.sleep(3_600)
    if row.what == "exception":
        raise ValueError("bad")
    return 2 * int(row.number)


def run(
    behaviours: list[str], isolation: Isolation = ALWAYS, *, is_repeated: bool = False, **columns: list[Any]
) -> Evaluated:
    rows = pa.RecordBatch.from_pydict({"what": behaviours, "number": [*range(len(behaviours))], **columns})
    function = Function(killer, "row", RESULT_TYPE, "retry")
    return evaluate(rows, function, RESULT_TYPE, 1, isolation, is_repeated=is_repeated)


def children() -> set[str]:
    return {
        task for path in Path("/proc/self/task").iterdir() for task in (path / "children").read_text().split()
    }


@pytest.mark.row("S13")
def test_a_row_that_kills_its_process_is_an_error_and_the_others_are_results() -> None:
    before, descriptors = children(), len([*Path("/proc/self/fd").iterdir()])
    found = run(["ok", "exit", "ok", "kill", "exception", "ok"])
    assert found.results.to_pylist() == [
        {"doubled": 0},
        None,
        {"doubled": 4},
        None,
        None,
        {"doubled": 10},
    ]
    assert {index: (error.kind, error.action) for index, error in found.errors.items()} == {
        1: ("ProcessDied", "retry"),
        3: ("ProcessDied", "retry"),
        4: ("ValueError", "retry"),
    }
    assert "status 3" in found.errors[1].message
    assert "SIGKILL" in found.errors[3].message
    assert children() == before, "a process is left"
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors, "a descriptor is left"


@pytest.mark.row("S13")
def test_a_row_that_needs_too_much_memory_is_an_error() -> None:
    found = run(["ok", "memory", "ok"], Isolation("always", 256 << 20, None))
    assert found.errors.keys() == {1}
    assert found.errors[1].kind in ("MemoryError", "ProcessDied")
    assert found.results.to_pylist() == [{"doubled": 0}, None, {"doubled": 4}]


@pytest.mark.row("S13")
def test_a_row_that_hangs_is_an_error() -> None:
    began_s = time.monotonic()
    found = run(["ok", "hang", "ok"], Isolation("always", None, 500))
    assert found.errors.keys() == {1}
    assert found.errors[1].kind == "TimedOut"
    assert time.monotonic() - began_s < scaled(60)


@pytest.mark.row("S13")
def test_records_that_were_delivered_before_and_repeated_tasks_are_isolated() -> None:
    auto = Isolation("auto", None, None)
    found = run(["ok", "exit", "ok"], auto, delivery_count=[1, 2, 1])
    assert found.errors.keys() == {1}
    found = run(["ok", "exit"], auto, is_repeated=True)
    assert found.errors.keys() == {1}
    function_pid: list[int] = []
    rows = pa.RecordBatch.from_pydict({"number": [1], "delivery_count": [1]})
    function = Function(lambda _: function_pid.append(os.getpid()) or 1, "row", RESULT_TYPE, "retry")
    evaluate(rows, function, RESULT_TYPE, 1, auto, is_repeated=False)
    assert function_pid == [os.getpid()], "a first delivery is processed in the worker"


@pytest.mark.row("S13")
def test_a_call_of_several_rows_that_dies_is_repeated_in_halves() -> None:
    def function(rows: pa.RecordBatch) -> pa.Table:
        if "exit" in rows.column("what").to_pylist():
            os._exit(1)
        return pa.table({"doubled": [2 * number for number in rows.column("number").to_pylist()]})

    behaviours = ["ok"] * 5 + ["exit"] + ["ok"] * 10
    rows = pa.RecordBatch.from_pydict({"what": behaviours, "number": [*range(16)]})
    vectorised = Function(function, "arrow", RESULT_TYPE, "retry")
    found = evaluate(rows, vectorised, RESULT_TYPE, 8, ALWAYS, is_repeated=False)
    assert found.errors.keys() == {5}
    assert [each is None for each in found.results.to_pylist()] == [at == 5 for at in range(16)]


@pytest.mark.row("S13")
def test_a_process_that_dies_with_another_one_alive_is_noticed_and_both_end(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def function(row: Any) -> int:
        if row.what == "forks":
            child = os.fork()
            if not child:
                time.sleep(3_600)
            pid_file.write_text(str(child))
            os._exit(4)
        return int(row.number)

    rows = pa.RecordBatch.from_pydict({"what": ["ok", "forks", "ok"], "number": [0, 1, 2]})
    called = Function(function, "row", RESULT_TYPE, lambda error: "reject" if "4" in str(error) else "retry")
    found = evaluate(rows, called, RESULT_TYPE, 1, ALWAYS, is_repeated=False)
    assert found.errors.keys() == {1}
    assert (found.errors[1].kind, found.errors[1].action) == ("ProcessDied", "reject"), "on_error decides"

    def is_ended() -> bool:
        state = Path(f"/proc/{pid_file.read_text()}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"

    wait_until(is_ended, scaled(30), "the end of what the process has started")
