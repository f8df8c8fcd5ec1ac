"""Partition transforms of Iceberg on Arrow columns, and the texts of `--partition-by` and `--sort-by`.

A task splits its rows by the values of the partition fields and reports these values with each file. The transforms are
those of the Iceberg specification, computed here on whole columns: pyiceberg's own work on one value at a time, and
importing pyiceberg would delay the start of every task.

Invariants:
* A partition value has the representation of Iceberg's manifests: integers for dates and times, text for strings.
* A null value has the partition value null, in a partition of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from mansio.iceberg.data_files import PartitionValue

IDENTITY: Final = "identity"
BUCKET: Final = "bucket"
TRUNCATE: Final = "truncate"
TIME_TRANSFORMS: Final = ("year", "month", "day", "hour")
PARAMETER_MAX: Final = 1 << 20
"""Maximum number of buckets, and maximum width of `truncate`."""

_FIELD: Final = re.compile(
    r"(?:(?P<name>[A-Za-z]+)\(\s*(?:(?P<parameter>\d+)\s*,\s*)?)?(?P<column>[^(),\s]+)\s*(?P<end>\))?"
)
_SPLIT_AT_COMMAS: Final = re.compile(r",(?![^()]*\))")
_PLURALS: Final = {f"{name}s": name for name in TIME_TRANSFORMS}
_DAY_US: Final = 86_400_000_000
_HOUR_US: Final = 3_600_000_000


@dataclass(frozen=True, slots=True)
class PartitionField:
    """One field of a partition spec: a transform of a column. `parameter`: number of buckets, or width."""

    column: str
    transform: str = IDENTITY
    parameter: int = 0

    def __str__(self) -> str:
        if self.transform == IDENTITY:
            return self.column
        if self.transform in (BUCKET, TRUNCATE):
            return f"{self.transform}({self.parameter}, {self.column})"
        return f"{self.transform}({self.column})"


@dataclass(frozen=True, slots=True)
class SortField:
    """One field of a sort order: a column and its direction."""

    column: str
    descending: bool = False

    def __str__(self) -> str:
        return f"{self.column} desc" if self.descending else self.column


def parse_partition_by(text: str) -> tuple[PartitionField, ...]:
    """Parse a partition spec such as `day(ts), bucket(16, key), country`.

    Raises:
        ConfigError: The text is no partition spec.
    """
    return tuple(_parse_partition_field(one.strip()) for one in _SPLIT_AT_COMMAS.split(text))


def _parse_partition_field(text: str) -> PartitionField:
    found = _FIELD.fullmatch(text)
    if found is None or (found["name"] is None) != (found["end"] is None):
        raise ConfigError(
            f"{text!r} is no partition field: write a column, year, month, day or hour(COLUMN), bucket(N, COLUMN) or"
            " truncate(WIDTH, COLUMN)"
        )
    name = (found["name"] or IDENTITY).lower()
    transform, parameter = _PLURALS.get(name, name), int(found["parameter"] or 0)
    if transform in (BUCKET, TRUNCATE):
        if not 0 < parameter <= PARAMETER_MAX:
            raise ConfigError(
                f"{text!r} needs a number from 1 to {PARAMETER_MAX}: {transform}(16, {found['column']})"
            )
    elif transform not in (IDENTITY, *TIME_TRANSFORMS):
        raise ConfigError(
            f"{text!r} names no partition transform: there are identity, year, month, day, hour, bucket and truncate"
        )
    elif found["parameter"] is not None:
        raise ConfigError(f"{text!r}: {transform} has no parameter, write {transform}({found['column']})")
    return PartitionField(found["column"], transform, parameter)


def parse_sort_by(text: str) -> tuple[SortField, ...]:
    """Parse a sort order such as `ts, key desc`.

    Raises:
        ConfigError: The text is no sort order.
    """
    fields = []
    for one in text.split(","):
        words = one.split()
        if not 1 <= len(words) <= 2 or (len(words) == 2 and words[1].lower() not in ("asc", "desc")):
            raise ConfigError(f"{one.strip()!r} is no sort field: write a column, or `COLUMN desc`")
        fields.append(SortField(words[0], len(words) == 2 and words[1].lower() == "desc"))
    return tuple(fields)


def check_transform(field: PartitionField, column: pa.DataType) -> None:
    """Check that a transform is defined for the type of its column.

    Raises:
        ConfigError: It is not; the message has the transforms that are.
    """
    is_time = pa.types.is_timestamp(column) or pa.types.is_date32(column)
    is_hashable = is_time or pa.types.is_int32(column) or pa.types.is_int64(column) or _is_bytes(column)
    is_allowed = {
        IDENTITY: (is_hashable and not pa.types.is_binary(column)) or pa.types.is_boolean(column),
        BUCKET: is_hashable,
        TRUNCATE: pa.types.is_int32(column) or pa.types.is_int64(column) or pa.types.is_string(column),
        "hour": pa.types.is_timestamp(column),
    }.get(field.transform, is_time)
    if not is_allowed:
        raise ConfigError(
            f"column {field.column} is {column}, which {field.transform} does not partition: bucket takes integers,"
            " strings, binary, dates and timestamps; truncate integers and strings; identity these and booleans, not"
            " binary; year, month and day dates and timestamps; hour timestamps"
        )


def partition_values(field: PartitionField, column: pa.Array) -> pa.Array:
    """Return the partition value of each row: int32 or int64, or the type of the column for strings and booleans."""
    if field.transform == BUCKET:
        return _buckets(column, field.parameter)
    if field.transform == TRUNCATE:
        return _truncate(column, field.parameter)
    if field.transform == IDENTITY:
        return _time_as_integers(column)
    if field.transform in ("year", "month"):
        years = pc.subtract(pc.year(column), 1970)
        if field.transform == "year":
            return years
        return pc.add(pc.multiply(years, 12), pc.subtract(pc.month(column), 1))
    if pa.types.is_date32(column.type):
        return column.cast(pa.int32())
    values, is_null = _integers(column)
    divided = np.floor_divide(values, _DAY_US if field.transform == "day" else _HOUR_US)
    return pa.array(divided, pa.int64(), mask=is_null)


def split_by_partition(
    fields: Sequence[PartitionField], batch: pa.RecordBatch
) -> Iterator[tuple[tuple[PartitionValue, ...], pa.RecordBatch]]:
    """Split rows by the values of all fields; yields (values, rows). The order of the rows is preserved."""
    if not batch.num_rows:
        return
    if not fields:
        yield (), batch
        return
    values = [partition_values(field, batch.column(field.column)) for field in fields]
    codes = np.zeros(batch.num_rows, np.int64)
    for one in values:
        encoded = one.dictionary_encode(null_encoding="encode")
        _, codes = np.unique(
            codes * len(encoded.dictionary) + encoded.indices.to_numpy(), return_inverse=True
        )
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        rows = order[start:end]
        whole = len(rows) == batch.num_rows
        yield (
            tuple(one[int(rows[0])].as_py() for one in values),
            batch if whole else batch.take(pa.array(rows)),
        )


def _is_bytes(column: pa.DataType) -> bool:
    return bool(pa.types.is_string(column) or pa.types.is_binary(column))


def _integers(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the values of integers, dates and times as int64, 0 for null, and which of them are null."""
    is_null = np.asarray(column.is_null())
    as_integers = _time_as_integers(column).cast(pa.int64())
    return np.asarray(pc.fill_null(as_integers, 0)), is_null


def _time_as_integers(column: pa.Array) -> pa.Array:
    """Dates as days and timestamps as microseconds since the epoch; other types are returned unchanged."""
    if pa.types.is_date32(column.type):
        return column.cast(pa.int32())
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    return column


def _truncate(column: pa.Array, width: int) -> pa.Array:
    if pa.types.is_string(column.type):
        return pc.utf8_slice_codeunits(column, 0, width)
    values, is_null = _integers(column)
    return pa.array(values - np.mod(values, width), column.type, mask=is_null)


# -- bucket: 32-bit Murmur3 with seed 0 --------


def _buckets(column: pa.Array, count: int) -> pa.Array:
    if not _is_bytes(column.type):
        values, is_null = _integers(column)
        return pa.array(_to_buckets(_murmur3_of_integers(values), count), pa.int32(), mask=is_null)
    import mmh3

    encoded = column.cast(pa.binary()).dictionary_encode()
    hashes = np.fromiter(
        (mmh3.hash(one) for one in encoded.dictionary.to_pylist()), np.int64, len(encoded.dictionary)
    )
    if not len(hashes):
        return pa.nulls(len(column), pa.int32())
    return pa.array(_to_buckets(hashes, count), pa.int32()).take(encoded.indices)


def _to_buckets(hashes: NDArray[np.int64], count: int) -> NDArray[np.int32]:
    return ((hashes & 0x7FFFFFFF) % count).astype(np.int32)


def _murmur3_of_integers(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the hashes of integers as Iceberg's specification defines them: of eight bytes in little-endian order."""
    words = values.astype("<i8").view("<u4").reshape(-1, 2)
    with np.errstate(over="ignore"):
        mixed = np.zeros(len(values), np.uint32)
        for word in (words[:, 0], words[:, 1]):
            mixed ^= _rotate(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
            mixed = _rotate(mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        mixed ^= np.uint32(8)  # the length in bytes
        mixed ^= mixed >> np.uint32(16)
        mixed *= np.uint32(0x85EBCA6B)
        mixed ^= mixed >> np.uint32(13)
        mixed *= np.uint32(0xC2B2AE35)
        mixed ^= mixed >> np.uint32(16)
    return mixed.astype(np.int64)


def _rotate(values: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return (values << np.uint32(bits)) | (values >> np.uint32(32 - bits))
