"""Replacement of data files of a table and change of its properties, in one commit (Iceberg's overwrite).

Invariants:
* Readers see either the old or the new files. A failed replacement leaves the table unchanged.
* A commit whose result the catalog did not return is looked up by the run id that it sets as a property.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

from mansio.iceberg.errors import CommitConflict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyiceberg.manifest import DataFile

    from mansio.iceberg.archive.table import ArchiveTable


def replace_files(
    table: ArchiveTable,
    new: Sequence[DataFile],
    properties: Mapping[str, str],
    *,
    run_property: str,
    is_replaced: Callable[[str], bool] = lambda _path: True,
) -> int:
    """Replace the files of the table that `is_replaced` selects by path, by the files `new`, and set these
    properties. `run_property`: name of the property for the run id. Returns the number of
    replaced files.

    Raises:
        CommitConflict: Another commit changed the table first, or the catalog's response was lost and the commit was
        not applied.
    """
    iceberg, run = table.iceberg, uuid.uuid4().hex
    with table.catalog_errors():
        old = [task.file for task in iceberg.scan().plan_files() if is_replaced(task.file.file_path)]
        try:
            with table.transaction() as transaction:
                transaction.set_properties({**properties, run_property: run})
                if old or new:
                    with transaction.update_snapshot().overwrite() as change:
                        for file in old:
                            change.delete_data_file(file)
                        for file in new:
                            change.append_data_file(file)
        except CommitFailedException as error:
            raise CommitConflict(
                f"{table.name} was changed by another program during this run; run it again"
            ) from error
        except CommitStateUnknownException as error:
            iceberg.refresh()
            if iceberg.properties.get(run_property) != run:
                raise CommitConflict(
                    f"the catalog did not say what became of the change of {table.name}, and it is not there; run it "
                    "again"
                ) from error
    return len(old)
