"""Plan of an upsert: which files of a table may hold the keys of a batch.

Every key belongs to one group: the values of the partition fields that depend on columns of the key only, such as a
bucket of the key. A file may hold a key of a batch if it is of the same group, and if the range of keys in the file,
which is in its manifest entry, overlaps the range of keys in the batch.

Invariants:
* A file that holds a key of the batch is always a candidate.
* A table with row-level deletes of other engines is refused, because rewriting a file would restore deleted rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyiceberg.conversions import from_bytes
from pyiceberg.types import PrimitiveType

from mansio.errors import ConfigError
from mansio.iceberg.commit import refuse_row_level_deletes
from mansio.iceberg.errors import InvalidDataFiles
from mansio.iceberg.result_table.upsert_tasks import MergeItem, group_name, key_bound

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

    from mansio.iceberg.result_table.partition_spec import PartitionField
    from mansio.iceberg.result_table.upsert_tasks import KeyBound, StagedGroup
    from mansio.iceberg.snapshot_files import SnapshotFiles

SMALL_FILE_BYTES: Final = 8 << 20
SMALL_FILES_MAX: Final = 8
"""Number of files below `SMALL_FILE_BYTES` in a group above which a batch that writes to the group merges them."""


@dataclass(frozen=True, slots=True)
class KeyedFile:
    """A live file: its group, and the bounds of the key's first column, None if unknown."""

    path: str
    bytes: int
    group: str
    low: KeyBound | None
    high: KeyBound | None


def group_fields(
    partition_by: Sequence[PartitionField], key: Sequence[str]
) -> list[tuple[int, PartitionField]]:
    """Return the partition fields that depend on the key only, with their places in the partition spec.

    Raises:
        ConfigError: There is none, so every batch would have to read all files of the table.
    """
    found = [(index, one) for index, one in enumerate(partition_by) if one.column in key]
    if not found:
        raise ConfigError(
            "a table for --mode update has to be partitioned by its key, so that a batch reads a part of its files:"
            f" create it with --partition-by 'bucket(16, {key[0]})'"
        )
    return found


def keyed_files(
    table: Table, files: SnapshotFiles, fields: Sequence[tuple[int, PartitionField]], key: str
) -> list[KeyedFile]:
    """Return the files of the current snapshot. `key`: the first column of the key.

    Raises:
        ConfigError: The table has files that cannot be rewritten file by file.
    """
    field = table.schema().find_field(key)
    assert isinstance(field.field_type, PrimitiveType)
    refuse_row_level_deletes(table, files)
    found = []
    for file in files.data_files():
        if file.spec_id != table.metadata.default_spec_id:
            raise ConfigError(
                f"table {'.'.join(table.name())} has files of an earlier partition spec: rewrite its data files first"
            )
        found.append(_keyed_file(file, fields, field.field_id, field.field_type))
    return found


def _keyed_file(
    file: DataFile, fields: Sequence[tuple[int, PartitionField]], field_id: int, column: PrimitiveType
) -> KeyedFile:
    def bound(bounds: dict[int, bytes] | None) -> KeyBound | None:
        if not bounds or field_id not in bounds:
            return None
        return key_bound(from_bytes(column, bounds[field_id]))

    group = group_name([file.partition[index] for index, _ in fields])
    return KeyedFile(
        file.file_path, file.file_size_in_bytes, group, bound(file.lower_bounds), bound(file.upper_bounds)
    )


def plan_merge(
    staged: Sequence[StagedGroup],
    files: Iterable[KeyedFile],
    *,
    small_bytes: int = SMALL_FILE_BYTES,
    small_files_max: int = SMALL_FILES_MAX,
) -> list[MergeItem]:
    """Return the work of the second job: one item per staged group.

    Raises:
        InvalidDataFiles: A group was staged by two tasks, so the last row of a key is not known.
    """
    by_group: dict[str, list[KeyedFile]] = {}
    for file in files:
        by_group.setdefault(file.group, []).append(file)
    if len({one.group for one in staged}) < len(staged):
        raise InvalidDataFiles("two tasks have staged the same group of keys")
    items = []
    for one in staged:
        of_group = by_group.get(one.group, [])
        small = [file.path for file in of_group if file.bytes < small_bytes]
        if len(small) <= small_files_max:
            small = []
        candidates = [file.path for file in of_group if _may_hold(file, one) and file.path not in small]
        items.append(MergeItem(one.path, tuple(candidates), tuple(small)))
    return items


def _may_hold(file: KeyedFile, staged: StagedGroup) -> bool:
    """Whether a file may hold a key of a staged group, according to its bounds."""
    if file.low is None or file.high is None:
        return True
    return not (file.high < staged.low or file.low > staged.high)  # type: ignore[operator]  # of the key's type
