"""Names of result tables, and the catalogs in which they are looked up.

`catalog.namespace.table` names a catalog of the Spark session (`spark.sql.catalog.NAME.*`), or else one of pyiceberg's
configuration (`.pyiceberg.yaml`, `PYICEBERG_CATALOG__NAME__URI`). `namespace.table` and `table` are in the SQLite
catalog of the warehouse, which needs no configuration; its name is `mansio`.

Invariants:
* A catalog is used only if it is named or if it is that of the warehouse; there is no other default.
* Credentials come from these configurations, never from the table's name.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from pyiceberg.catalog import load_catalog
from pyiceberg.utils.config import Config

from mansio.errors import ConfigError
from mansio.iceberg.archive.table import NAMESPACE
from mansio.iceberg.catalog import (
    CATALOG_NAME,
    FILE_IO_CLASS,
    sqlite_address,
    warehouse_location,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.catalog import Catalog

SPARK_CATALOG_PREFIX: Final = "spark.sql.catalog."
NO_CATALOG: Final = (
    "the table is in no configured catalog: give --warehouse DIR, or write catalog.namespace.table"
)
"""Message of the error for a table without a catalog and without a warehouse."""
_PART: Final = re.compile(r"[^\s.`'\"/\\]+")
_SPARK_KINDS: Final = {
    "rest": "rest",
    "org.apache.iceberg.rest.RESTCatalog": "rest",
    "jdbc": "sql",
    "org.apache.iceberg.jdbc.JdbcCatalog": "sql",
    "hive": "hive",
    "org.apache.iceberg.hive.HiveCatalog": "hive",
    "glue": "glue",
    "org.apache.iceberg.aws.glue.GlueCatalog": "glue",
}
"""pyiceberg's type of catalog for Iceberg's `type` or `catalog-impl`."""
_JAVA_ONLY: Final = frozenset({"type", "catalog-impl", "io-impl", "cache-enabled", "default-namespace"})
"""Settings of Iceberg's Java catalogs that pyiceberg does not have, or that have another meaning there."""


@dataclass(frozen=True, slots=True)
class TableName:
    """Name of a table. `catalog` is empty for the catalog of the warehouse."""

    catalog: str
    namespace: tuple[str, ...]
    table: str

    @property
    def identifier(self) -> tuple[str, ...]:
        """The name within the catalog."""
        return (*self.namespace, self.table)

    def __str__(self) -> str:
        return ".".join((self.catalog or CATALOG_NAME, *self.identifier))


@dataclass(frozen=True, slots=True)
class OpenCatalog:
    """A catalog, and how to open it again: its name, its properties for pyiceberg, and its address for messages."""

    catalog: Catalog
    name: str
    properties: dict[str, str]
    address: str

    def __reduce__(self) -> tuple[object, ...]:
        """Give a copy in another process a connection of its own."""
        return _reopen_catalog, (self.name, self.properties, self.address)


def _reopen_catalog(name: str, properties: dict[str, str], address: str) -> OpenCatalog:
    return OpenCatalog(load_catalog(name, **properties), name, properties, address)


def parse_table_name(text: str) -> TableName:
    """Parse `catalog.namespace.table`, `namespace.table` or `table`; a namespace may have several levels. The first
    part of three or more is the catalog.

    Raises:
        ConfigError: The text is no name of a table.
    """
    parts = text.split(".")
    if not all(_PART.fullmatch(part) for part in parts):
        raise ConfigError(f"{text!r} is no table: write catalog.namespace.table, namespace.table or table")
    if len(parts) == 1:
        return TableName("", (NAMESPACE,), parts[0])
    if len(parts) == 2:
        return TableName("", (parts[0],), parts[1])
    catalog = "" if parts[0] == CATALOG_NAME and not _is_configured(CATALOG_NAME) else parts[0]
    return TableName(catalog, tuple(parts[1:-1]), parts[-1])


def open_catalog(name: TableName, warehouse: str | None, spark_settings: Mapping[str, str]) -> OpenCatalog:
    """Open the catalog of a table.

    Raises:
        ConfigError: The catalog is not configured, or is of a kind that pyiceberg does not have.
        CatalogUnavailable: The warehouse is not a directory of this machine.
    """
    if not name.catalog:
        return _warehouse_catalog(warehouse)
    settings = spark_catalog_settings(name.catalog, spark_settings)
    if settings is not None:
        properties = to_pyiceberg_properties(name.catalog, settings)
    elif _is_configured(name.catalog):
        properties = {
            key: str(value) for key, value in (Config().get_catalog_config(name.catalog) or {}).items()
        }
    else:
        raise ConfigError(
            f"there is no catalog {name.catalog}: configure it in .pyiceberg.yaml, by PYICEBERG_CATALOG__"
            f"{name.catalog.upper()}__URI, or by --conf {SPARK_CATALOG_PREFIX}{name.catalog}.uri=...; a table of the"
            " warehouse is NAMESPACE.TABLE"
        )
    if properties.get("warehouse", "").startswith(("file:", "/")):
        properties.setdefault("py-io-impl", FILE_IO_CLASS)
    return OpenCatalog(
        load_catalog(name.catalog, **properties),
        name.catalog,
        properties,
        properties.get("uri", name.catalog),
    )


def _warehouse_catalog(warehouse: str | None) -> OpenCatalog:
    if warehouse is None:
        raise ConfigError(NO_CATALOG)
    location = warehouse_location(warehouse)
    address = sqlite_address(location)
    os.makedirs(urlsplit(location).path, exist_ok=True)
    properties = {"type": "sql", "uri": address, "warehouse": location, "py-io-impl": FILE_IO_CLASS}
    return OpenCatalog(load_catalog(CATALOG_NAME, **properties), CATALOG_NAME, properties, address)


def _is_configured(name: str) -> bool:
    """Whether pyiceberg's configuration has a catalog of this name."""
    return bool(Config().get_catalog_config(name))


def spark_catalog_settings(name: str, spark_settings: Mapping[str, str]) -> dict[str, str] | None:
    """Return the settings `spark.sql.catalog.NAME.*` without this prefix; None if the session has no such catalog."""
    prefix = f"{SPARK_CATALOG_PREFIX}{name}"
    found = {
        key.removeprefix(f"{prefix}."): value
        for key, value in spark_settings.items()
        if key.startswith(f"{prefix}.")
    }
    return found if found or prefix in spark_settings else None


def to_pyiceberg_properties(name: str, settings: Mapping[str, str]) -> dict[str, str]:
    """pyiceberg's properties for the settings of a catalog of Iceberg's Spark runtime.

    Raises:
        ConfigError: pyiceberg has no catalog of this kind.
    """
    kind = settings.get("type") or settings.get("catalog-impl") or ""
    known = _SPARK_KINDS.get(kind)
    if known is None:
        found = f"is of type {kind}" if kind else "has no type"
        raise ConfigError(
            f"catalog {name} {found}: set {SPARK_CATALOG_PREFIX}{name}.type to rest, jdbc, hive or glue; others cannot"
            " be written from Python"
        )
    properties = {key: value for key, value in settings.items() if key not in _JAVA_ONLY}
    properties["type"] = known
    if known == "sql":
        properties["uri"] = _sqlalchemy_address(name, settings)
        for key in [key for key in properties if key.startswith("jdbc.")]:
            del properties[key]
    return properties


def _sqlalchemy_address(name: str, settings: Mapping[str, str]) -> str:
    """Return the address of a JDBC catalog as SQLAlchemy writes it."""
    uri = settings.get("uri", "").removeprefix("jdbc:")
    if uri.startswith("sqlite:") and not uri.startswith("sqlite://"):
        return f"sqlite:///{uri.removeprefix('sqlite:').removeprefix('file:').partition('?')[0]}"
    parts = urlsplit(uri)
    driver = {"postgresql": "postgresql+psycopg2", "mysql": "mysql+pymysql"}.get(parts.scheme)
    if driver is None:
        raise ConfigError(
            f"catalog {name} has the address jdbc:{uri}: of JDBC, sqlite, postgresql and mysql are known"
        )
    user, password = settings.get("jdbc.user"), settings.get("jdbc.password")
    login = f"{user}:{password}@" if user and password else f"{user}@" if user else ""
    return f"{driver}://{login}{parts.netloc}{parts.path}"
