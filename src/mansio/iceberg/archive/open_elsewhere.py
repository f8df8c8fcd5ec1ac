"""Instructions for opening a table in other engines: Spark SQL with Iceberg's runtime, pyiceberg and DuckDB.

Invariants:
* A line is complete: it works when it is pasted into a shell (Spark), into Python (pyiceberg) or into DuckDB.
* The lines contain no credentials: user, password and tokens of the catalog are left out.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

SPARK_CATALOG_CLASS: Final = "org.apache.iceberg.spark.SparkCatalog"
SPARK_RUNTIME_PACKAGE: Final = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"
"""Iceberg's runtime for Spark 4.1, the newest version of Spark for which there is one."""
SQLITE_DRIVER_PACKAGE: Final = "org.xerial:sqlite-jdbc:3.54.1.0"
SHOWN_ROWS: Final = 20
"""Number of rows that the commands read, because a table may be large."""
_SPARK_TYPES: Final = {"sql": "jdbc"}
"""Type of a catalog in Iceberg's Spark runtime, where pyiceberg's differs."""


def open_elsewhere(table: Table) -> tuple[str, str, str]:
    """One line each for Spark SQL 4.1, for pyiceberg, and for DuckDB, which reads one state of the table by its
    metadata file. Before the colon of each line is the name of the engine.
    """
    identifier = table.name()
    properties = _public_properties(table.catalog)
    command = shlex.join(["spark-sql", *_spark_arguments(table.catalog.name, identifier, properties)])
    arguments = "".join(f", {name}={value!r}" for name, value in properties.items())
    metadata = table.metadata_location.replace("'", "''")
    return (
        f"Spark 4.1: {command}",
        f"pyiceberg: from pyiceberg.catalog import load_catalog; load_catalog({table.catalog.name!r}{arguments})"
        f".load_table({tuple(identifier)!r}).scan(limit={SHOWN_ROWS}).to_arrow()",
        f"DuckDB: INSTALL iceberg; LOAD iceberg; SELECT * FROM iceberg_scan('{metadata}') LIMIT {SHOWN_ROWS};",  # noqa: S608
    )


def _public_properties(catalog: Catalog) -> dict[str, str]:
    """Type, address and warehouse of a catalog, without credentials and without the timeout of SQLite."""
    found = {"type": type(catalog).__name__.removesuffix("Catalog").lower()}
    found |= {name: catalog.properties[name] for name in ("uri", "warehouse") if catalog.properties.get(name)}
    if "uri" in found:
        parts = urlsplit(found["uri"])
        netloc = parts.netloc.rpartition("@")[2]
        found["uri"] = f"{parts.scheme}://{netloc}{parts.path}"
    return found


def _spark_arguments(catalog: str, identifier: tuple[str, ...], properties: Mapping[str, str]) -> list[str]:
    """Return the arguments of `spark-sql`."""
    uri = properties.get("uri", "")
    packages = [SPARK_RUNTIME_PACKAGE]
    if properties["type"] == "sql":
        scheme, _, rest = uri.partition("://")
        if scheme == "sqlite":
            packages.append(SQLITE_DRIVER_PACKAGE)
            uri = f"jdbc:sqlite:{rest.removeprefix('/')}"
        else:
            uri = f"jdbc:{scheme.partition('+')[0]}://{rest}"
    settings = {
        "": SPARK_CATALOG_CLASS,
        ".type": _SPARK_TYPES.get(properties["type"], properties["type"]),
        ".uri": uri,
        ".warehouse": properties.get("warehouse", ""),
    }
    names = ".".join(f"`{name}`" for name in (catalog, *identifier))
    return [
        "--packages",
        ",".join(packages),
        *(
            word
            for name, value in settings.items()
            if value
            for word in ("--conf", f"spark.sql.catalog.{catalog}{name}={value}")
        ),
        "-e",
        f"SELECT * FROM {names} LIMIT {SHOWN_ROWS}",  # noqa: S608  # names of a table that exists
    ]
