"""Replacement of data files of a table and change of its properties, in one commit (Iceberg's overwrite).

Invariants:
* Readers see either the old or the new files. A failed replacement leaves the table unchanged.
* A commit whose result the catalog did not return is looked up by the run id that it sets as a property.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

from mansio.iceberg.commit import commit_files
from mansio.iceberg.errors import CommitConflict
from mansio.iceberg.snapshot_files import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mansio.iceberg.catalog import CatalogTable
    from mansio.iceberg.data_files import WrittenFile


def replace_files(
    table: CatalogTable,
    new: Sequence[WrittenFile],
    properties: Mapping[str, str],
    *,
    run_property: str,
    is_replaced: Callable[[str], bool] = lambda _path: True,
) -> int:
    """Replace the files of the table that `is_replaced` selects by path, by the files `new`, and set these properties.
    Return the number of replaced files. `run_property`: name of a property that is set to a new id, by which a commit
    is found whose response was lost.

    Raises:
        CommitConflict: Another commit changed the table first, or the catalog's response was lost and the commit was
        not applied.
        InvalidDataFiles: A file is not as its task reported; nothing was committed.
        ConfigError: The table has row-level deletes of another engine.
        CatalogUnavailable, CatalogLocked: The catalog did not answer, or is locked.
    """
    iceberg, run = table.iceberg, uuid.uuid4().hex
    with table.catalog_errors():
        live = SnapshotReader().read(iceberg)
        old = [file for file in live.data_files() if is_replaced(file.file_path)]
        changed = {**properties, run_property: run}
        try:
            if old or new:
                commit_files(iceberg, new, old, live=live, properties=changed, summary={})
            else:
                with table.transaction() as transaction:
                    transaction.set_properties(changed)
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
