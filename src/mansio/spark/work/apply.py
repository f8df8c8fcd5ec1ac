"""`mansio.spark.work.apply`: calls a function for the rows of a DataFrame, in one pass, and keeps the errors as rows.

Invariants:
* Each input row is one output row, in the order of its partition: with the result, or with an error.
* The function is called once for each row in each attempt of a task; a call of several rows that kills its process is
  repeated in parts.
* An exception of the function, and in a separate process its death, never fails the task.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark import TaskContext
from pyspark.sql.types import LongType, StringType, StructField, StructType

from mansio.errors import ConfigError
from mansio.spark.spark_versions import to_arrow_type
from mansio.spark.work.calls import Call, calls_of, run_isolated
from mansio.spark.work.errors import ACTIONS, RETRY, ProcessDied, TimedOut
from mansio.spark.work.evaluation import ARROW, KINDS, PANDAS, ROW, Evaluated, Function, join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame

RESULT: Final = "result"
ERROR: Final = "error"
DELIVERY_COUNT: Final = "delivery_count"

AUTO: Final = "auto"
ALWAYS: Final = "always"
NEVER: Final = "never"
ISOLATIONS: Final = (AUTO, ALWAYS, NEVER)

DEFAULT_ROWS_PER_CALL: Final = {ROW: 1, PANDAS: 100, ARROW: 100}
"""A row function is called for each row. An exception of a vectorised one fails all rows of its call: few of them."""

ERROR_TYPE: Final = StructType(
    [
        StructField("kind", StringType()),
        StructField("message", StringType()),
        StructField("action", StringType()),
        StructField("delay_ms", LongType()),
    ]
)


class Isolation(NamedTuple):
    """Which rows are processed in a process of their own, and its limits. `when`: `auto`, `always` or `never`."""

    when: str
    memory_bytes_max: int | None
    timeout_ms: int | None


def apply(
    frame: DataFrame,
    function: Callable[[Any], Any],
    *,
    schema: str | StructType,
    kind: str = ROW,
    on_error: str | Callable[[BaseException], str | int] = RETRY,
    rows_per_call: int | None = None,
    isolate: str = AUTO,
    memory_bytes_max: int | None = None,
    timeout_ms: int | None = None,
) -> DataFrame:
    """Return the rows of `frame` with two more columns: `result`, what the function returns for the row, and `error`,
    null unless it failed.

    `schema`: of a result, as DDL text or `StructType`. `kind`: `row`, the function gets a `Row` and returns a
    dictionary, a tuple or, for a schema of one field, a value; `pandas`, it gets a `pandas.DataFrame` and returns one
    (or a `Series`) with as many rows; `arrow`, the same with a `pyarrow.RecordBatch`. `rows_per_call`: maximum number
    of rows of a call of the last two, 100 by default: if such a call raises an exception, all its rows fail, unless it
    is `RowErrors`.

    `error` has the fields `kind` (name of the exception), `message`, `action` (`retry` or `reject`) and `delay_ms` (-1:
    the backoff of the group). `on_error` chooses the action: `retry`, `reject`, or a function of the exception that
    returns one of them or a delay in ms; the exceptions `Reject` and `Retry` choose it themselves.

    `isolate`: `always` calls the function in a forked process, so that a row that kills it, or needs too much memory
    or time, becomes an error, too; `never` calls it in the worker of Spark; `auto` forks in the second attempt of a
    task and for records that were delivered before (column `delivery_count`). `memory_bytes_max`: memory that the
    process may take in addition to that of the worker. `timeout_ms`: maximum duration of a call; with it, all calls are
    isolated.

    Spark evaluates a DataFrame for each action, and calls the function again then. `persist()` makes this rare, but
    Spark may lose what it has persisted with an executor. Raises `ConfigError` for an invalid argument."""
    _check_choice("kind", kind, KINDS)
    _check_choice("isolate", isolate, ISOLATIONS)
    if isinstance(on_error, str):
        _check_choice("on_error", on_error, ACTIONS)
    for name, number in (
        ("rows_per_call", rows_per_call),
        ("memory_bytes_max", memory_bytes_max),
        ("timeout_ms", timeout_ms),
    ):
        if number is not None and number < 1:
            raise ConfigError(f"{name} is {number}: give a number above 0")
    for name in (RESULT, ERROR):
        if name in frame.columns:
            raise ConfigError(f"the DataFrame has a column {name} already: rename it")
    if timeout_ms is not None:
        if isolate == NEVER:
            raise ConfigError("timeout_ms needs a process of its own: do not set isolate to never")
        isolate = ALWAYS
    result_type = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    output = StructType(
        [*frame.schema.fields, StructField(RESULT, result_type), StructField(ERROR, ERROR_TYPE)]
    )
    run = partial(
        _apply_to_batches,
        function=function,
        kind=kind,
        output=output,
        on_error=on_error,
        rows_per_call=rows_per_call or DEFAULT_ROWS_PER_CALL[kind],
        isolation=Isolation(isolate, memory_bytes_max, timeout_ms),
    )
    return frame.mapInArrow(run, output)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}: give one of {', '.join(choices)}")


def _apply_to_batches(
    batches: Iterator[pa.RecordBatch],
    *,
    function: Callable[[Any], Any],
    kind: str,
    output: StructType,
    on_error: str | Callable[[BaseException], str | int],
    rows_per_call: int,
    isolation: Isolation,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task with their results and errors."""
    import pyarrow as pa

    result_type = to_arrow_type(output[RESULT].dataType)
    error_type = to_arrow_type(ERROR_TYPE)
    called = Function(function, kind, result_type, on_error)
    context = TaskContext.get()
    is_repeated = context is not None and context.attemptNumber() > 0
    for batch in batches:
        evaluated = evaluate(batch, called, result_type, rows_per_call, isolation, is_repeated=is_repeated)
        errors = [
            None if (error := evaluated.errors.get(index)) is None else error._asdict()
            for index in range(batch.num_rows)
        ]
        yield pa.RecordBatch.from_arrays(
            [*batch.columns, evaluated.results, pa.array(errors, error_type)],
            [*batch.schema.names, RESULT, ERROR],
        )


def evaluate(
    batch: pa.RecordBatch,
    function: Function,
    result_type: pa.StructType,
    rows_per_call: int,
    isolation: Isolation,
    *,
    is_repeated: bool,
) -> Evaluated:
    """Call the function for the rows of a batch. `is_repeated`: the task has failed before."""
    parts: list[tuple[int, Evaluated]] = []
    for first, end, isolated, was_delivered in _runs(batch, isolation.when, is_repeated=is_repeated):
        rows = batch.slice(first, end - first)
        # A record that has failed is called alone: its neighbours would fail with it until none has an attempt left.
        size = 1 if was_delivered else rows_per_call
        found: Iterable[tuple[int, Evaluated]]
        if isolated:
            found = _isolated(rows, calls_of(rows.num_rows, size), function, isolation)
        elif function.is_for_row:
            found = [(0, function.call(rows))]
        else:
            calls = calls_of(rows.num_rows, size)
            found = ((call.first, function.call(rows.slice(call.first, call.size))) for call in calls)
        parts += [(first + begin, each) for begin, each in found]
    return join(parts, result_type)


def _isolated(
    rows: pa.RecordBatch,
    calls: Sequence[Call],
    function: Function,
    isolation: Isolation,
) -> Iterator[tuple[int, Evaluated]]:
    from mansio.spark.work.child_process import Limits, make_calls  # not on systems without fork

    limits = Limits(isolation.memory_bytes_max, isolation.timeout_ms)
    for call, result, died in run_isolated(
        calls, lambda waiting: make_calls(rows, waiting, function.call, limits)
    ):
        if result is None:
            assert died is not None, "a call without a result has died"
            result = function.failed((TimedOut if died.timed_out else ProcessDied)(died.message))
        yield call.first, result


def _runs(batch: pa.RecordBatch, when: str, *, is_repeated: bool) -> list[tuple[int, int, bool, bool]]:
    """Divide a batch into runs of rows (first, end) that are isolated, or not, and that were delivered before, or
    not."""
    if not batch.num_rows:
        return []
    always = when == ALWAYS or (when == AUTO and is_repeated)
    if DELIVERY_COUNT not in batch.schema.names:
        return [(0, batch.num_rows, always, False)]
    runs: list[tuple[int, int, bool, bool]] = []
    for index, count in enumerate(batch.column(DELIVERY_COUNT).to_pylist()):
        was_delivered = count is not None and count > 1
        if runs and runs[-1][3] == was_delivered:
            runs[-1] = (runs[-1][0], index + 1, *runs[-1][2:])
        else:
            runs.append((index, index + 1, always or (when == AUTO and was_delivered), was_delivered))
    return runs
