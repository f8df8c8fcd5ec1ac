"""Instructions for opening a table in other engines: plain Spark SQL, pyiceberg and DuckDB.

Invariants:
* The lines contain no credentials: user, password and tokens of the catalog are left out.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.table import Table

SPARK_CATALOG_CLASS: Final = "org.apache.iceberg.spark.SparkCatalog"
_SPARK_TYPES: Final = {"sql": "jdbc"}
"""Type of a catalog in Iceberg's Spark runtime, where pyiceberg's differs."""


def open_elsewhere(table: Table) -> tuple[str, str, str]:
    """One line each for plain Spark SQL with the Iceberg runtime, for pyiceberg, and for DuckDB, which reads one state
    of the table by its metadata file.
    """
    catalog = table.catalog.name
    identifier = ".".join(table.name())
    properties = _public_properties(table.catalog.properties)
    spark = {
        f"spark.sql.catalog.{catalog}": SPARK_CATALOG_CLASS,
        **{
            f"spark.sql.catalog.{catalog}.{name}": value
            for name, value in _spark_properties(properties).items()
        },
    }
    settings = " ".join(f"--conf {shlex.quote(f'{name}={value}')}" for name, value in spark.items())
    arguments = "".join(f", {name}={value!r}" for name, value in properties.items())
    return (
        f'Spark: spark-sql {settings} -e "SELECT * FROM {catalog}.{identifier}"',  # noqa: S608  # names of a table that exists
        f"pyiceberg: load_catalog({catalog!r}{arguments}).load_table({identifier!r}).scan().to_arrow()",
        f"DuckDB: INSTALL iceberg; LOAD iceberg; SELECT * FROM iceberg_scan('{table.metadata_location}')",  # noqa: S608
    )


def _public_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Type, address and warehouse of a catalog, without credentials and without the timeout of SQLite."""
    found = {name: properties[name] for name in ("type", "uri", "warehouse") if properties.get(name)}
    if "uri" in found:
        parts = urlsplit(found["uri"])
        netloc = parts.netloc.rpartition("@")[2]
        found["uri"] = f"{parts.scheme}://{netloc}{parts.path}"
    return found


def _spark_properties(properties: Mapping[str, str]) -> dict[str, str]:
    found = dict(properties)
    kind = found.get("type", "")
    found["type"] = _SPARK_TYPES.get(kind, kind)
    if kind == "sql":
        scheme, _, rest = found["uri"].partition("://")
        found["uri"] = (
            f"jdbc:sqlite:{rest[1:]}" if scheme == "sqlite" else f"jdbc:{scheme.partition('+')[0]}://{rest}"
        )
    return found
