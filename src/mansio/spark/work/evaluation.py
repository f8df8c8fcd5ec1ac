"""A call of the user's function with some rows: its results as an Arrow array, and the errors of the rows that failed.

Invariants:
* The function is called once for each call.
* A result that does not fit the schema is an error of its row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import Row

from mansio.errors import ConfigError
from mansio.spark.work.errors import RowErrors, row_error
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mansio.spark.work.errors import RowError

ROW: Final = "row"
PANDAS: Final = "pandas"
ARROW: Final = "arrow"
KINDS: Final = (ROW, PANDAS, ARROW)


class Evaluated(NamedTuple):
    """Result of a call: a struct for each row, null for those that failed, and the errors of these by their index."""

    results: pa.Array
    errors: dict[int, RowError]


class Function:
    """The user's function and how it is called."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        kind: str,
        result_type: pa.StructType,
        on_error: str | Callable[[BaseException], str | int],
    ) -> None:
        self.is_for_row = kind == ROW
        """Whether the function is called for each row, however many `call` gets."""
        self._function = function
        self._kind = kind
        self._type = result_type
        self._names = [each.name for each in result_type]
        self._on_error = on_error

    def call(self, rows: pa.RecordBatch) -> Evaluated:
        """Call the function with these rows; a row function is called for each of them."""
        if self.is_for_row:
            return self._call_rows(rows)
        errors: Mapping[int, BaseException] = {}
        try:
            try:
                returned = self._function(rows.to_pandas() if self._kind == PANDAS else rows)
            except RowErrors as some:
                returned, errors = some.results, some.errors
            if any(not 0 <= index < rows.num_rows for index in errors):
                raise ConfigError(f"RowErrors names a row that the call of {rows.num_rows} rows has not")
            results = self._vectorised_results(returned, rows.num_rows, errors)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # also SystemExit: it is the user's function that fails
            failed = row_error(error, self._on_error)
            return Evaluated(pa.nulls(rows.num_rows, self._type), dict.fromkeys(range(rows.num_rows), failed))
        found = {index: row_error(error, self._on_error) for index, error in errors.items()}
        return Evaluated(_without_rows(results, found), found)

    def failed(self, error: BaseException) -> Evaluated:
        """Return the result of a row whose process has died."""
        return Evaluated(pa.nulls(1, self._type), {0: row_error(error, self._on_error)})

    def _call_rows(self, rows: pa.RecordBatch) -> Evaluated:
        as_row = Row(*rows.schema.names)
        function, as_dict = self._function, self._as_dict
        returned: list[dict[str, Any] | None] = []
        errors: dict[int, RowError] = {}
        for index, values in enumerate(_python_rows(rows)):
            if isinstance(values, Exception):
                errors[index] = row_error(values, self._on_error)
                returned.append(None)
                continue
            try:
                returned.append(as_dict(function(as_row(*values))))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  # also SystemExit: it is the user's function that fails
                errors[index] = row_error(error, self._on_error)
                returned.append(None)
        try:
            return Evaluated(pa.array(returned, self._type), errors)
        except Exception:  # noqa: BLE001  # some results do not fit the schema: the next step finds which
            return self._convert_one_by_one(returned, errors)

    def _convert_one_by_one(
        self, returned: Sequence[dict[str, Any] | None], errors: dict[int, RowError]
    ) -> Evaluated:
        """Convert results of which some do not fit the schema."""
        pieces: list[pa.Array] = []
        for index, each in enumerate(returned):
            try:
                piece = pa.array([each], self._type)
            except Exception as error:  # noqa: BLE001  # of any type, by what the function has returned
                errors[index] = row_error(error, self._on_error)
                piece = pa.nulls(1, self._type)
            pieces.append(piece)
        return Evaluated(pa.concat_arrays(pieces), errors)

    def _as_dict(self, returned: Any) -> dict[str, Any]:
        """Return the result of a row as a dictionary with the fields of the schema."""
        names = self._names
        if isinstance(returned, Row) and hasattr(returned, "__fields__"):
            returned = returned.asDict()
        if isinstance(returned, dict):
            unknown = returned.keys() - {*names}
            if unknown:
                raise ConfigError(
                    f"the result has a field {min(map(str, unknown))}, which the schema has not"
                )
            return returned
        if isinstance(returned, tuple):  # Row is one
            if len(returned) != len(names):
                raise ConfigError(f"the result has {len(returned)} values, and the schema {len(names)}")
            return dict(zip(names, returned, strict=True))
        if len(names) == 1:
            return {names[0]: returned}
        raise ConfigError(f"the result is a {type(returned).__name__}: return a dictionary, a tuple or a Row")

    def _vectorised_results(self, returned: Any, rows: int, failed: Mapping[int, object]) -> pa.Array:
        """Return what a vectorised function has returned as structs. The values of failed rows do not matter."""
        fields = list(self._type)
        if self._kind == PANDAS:
            import pandas as pd

            if isinstance(returned, pd.Series) and len(fields) == 1:
                returned = returned.to_frame(fields[0].name)
            if not isinstance(returned, pd.DataFrame):
                raise ConfigError(f"the function returned a {type(returned).__name__}, not a DataFrame")
            if failed and len(returned) == rows:
                returned = returned.astype(object)
                returned.iloc[sorted(failed)] = None
            returned = pa.Table.from_pandas(returned, schema=pa.schema(fields), preserve_index=False)
        if isinstance(returned, pa.RecordBatch):
            returned = pa.Table.from_batches([returned])
        if not isinstance(returned, pa.Table):
            raise ConfigError(
                f"the function returned a {type(returned).__name__}, not a RecordBatch or Table"
            )
        if returned.num_rows != rows:
            raise ConfigError(f"the function returned {returned.num_rows} rows for {rows}")
        table = returned.select([each.name for each in fields]).cast(pa.schema(fields)).combine_chunks()
        columns = [
            column.chunk(0) if column.num_chunks else pa.nulls(0, column.type) for column in table.columns
        ]
        return pa.StructArray.from_arrays(columns, fields=fields)


def _without_rows(results: pa.Array, failed: Mapping[int, object]) -> pa.Array:
    """Return the structs with those of failed rows null."""
    if not failed:
        return results
    mask = pa.array([index in failed for index in range(len(results))])
    return pa.StructArray.from_arrays(results.flatten(), fields=list(results.type), mask=mask)


def _python_rows(rows: pa.RecordBatch) -> Iterable[tuple[Any, ...] | Exception]:
    """Return the values of each row; the error of a row with a value that Python cannot have, such as a timestamp of
    the year 10,000."""
    try:
        return zip(*(_python_values(column) for column in rows.columns), strict=True)
    except (ValueError, OverflowError, TypeError):
        return [_python_row(rows.slice(index, 1)) for index in range(rows.num_rows)]


def _python_row(row: pa.RecordBatch) -> tuple[Any, ...] | Exception:
    try:
        return tuple(_python_values(column)[0] for column in row.columns)
    except (ValueError, OverflowError, TypeError) as error:
        return without_traceback(error)


def _python_values(column: pa.Array) -> list[Any]:
    values: list[Any] = column.to_pylist(maps_as_pydicts="lossy")
    return values


def join(parts: Sequence[tuple[int, Evaluated]], result_type: pa.StructType) -> Evaluated:
    """Return the results of calls, which begin at these rows, as one."""
    errors = {first + index: error for first, each in parts for index, error in each.errors.items()}
    arrays = [each.results for _, each in parts]
    return Evaluated(pa.concat_arrays(arrays) if arrays else pa.nulls(0, result_type), errors)
