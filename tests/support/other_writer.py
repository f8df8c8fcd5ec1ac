"""Another program that appends to an Iceberg table, with pyiceberg alone.

`python -m support.other_writer TABLE BEGIN END` appends one row after the other, with `id` from BEGIN to END, to TABLE
of the catalog whose name and properties, as JSON, are the first line of its standard input. It prints `ready`, and
begins at the second line. A conflict that pyiceberg did not solve is tried again, as any program would.
"""

from __future__ import annotations

import json
import sys
import time

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitFailedException, ValidationException
from sqlalchemy.exc import OperationalError

CONFLICT_WAIT_S = 0.02


def append_rows(catalog: str, properties: dict[str, str], name: str, begin: int, end: int) -> None:
    """Append the rows. Each is in the table once, because these errors say that it is not there."""
    table = load_catalog(catalog, **properties).load_table(name)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(begin, end):
        row = pa.table({"id": pa.array([number], pa.int64()), "name": [f"other{number}"]})
        while True:
            try:
                table.append(row)
                break
            except (CommitFailedException, ValidationException, OperationalError):
                time.sleep(CONFLICT_WAIT_S)
                table.refresh()


if __name__ == "__main__":
    catalog_name, its_properties = json.loads(sys.stdin.readline())
    append_rows(catalog_name, its_properties, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
