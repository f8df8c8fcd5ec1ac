"""Iceberg catalogs and the tables in them: opening a catalog, its errors, and what all tables have.

A catalog is given by its address. None: a SQLite file in the warehouse, which is sufficient for one machine.
`http(s)://...`: an Iceberg REST catalog. Other SQLAlchemy addresses work as in pyiceberg. Credentials come from
pyiceberg's configuration (`~/.pyiceberg.yaml`, `PYICEBERG_CATALOG__MANSIO__TOKEN`), never from a command line.

Invariants:
* A commit waits for the lock of a SQLite catalog for at most `CATALOG_LOCK_ATTEMPTS_MAX` times
  `CATALOG_LOCK_TIMEOUT_S`.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import RESTError, TableAlreadyExistsError

from mansio.errors import ConfigError
from mansio.iceberg.commit import CachedMetadataTransaction, commit_with_retries, refresh_table
from mansio.iceberg.errors import CatalogLocked, CatalogUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyiceberg.catalog import Catalog
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

CATALOG_NAME = "mansio"
CATALOG_FILE_NAME = "catalog.db"
FILE_IO_CLASS = "mansio.iceberg.fsync_io.DurableFileIO"
RESERVED_URI_CHARACTERS = "#?%"
CATALOG_LOCK_TIMEOUT_S = 5
CATALOG_LOCK_ATTEMPTS_MAX = 3
MAINTENANCE_ATTEMPTS_MAX = 8
"""Maximum number of attempts of maintenance to change a table while other programs commit to it."""
MAINTENANCE_BACKOFF_S = 0.2

Result = TypeVar("Result")


class CatalogTable:
    """A table and the address of its catalog: what commits and maintenance of every kind of table need. Not
    thread-safe.
    """

    def __init__(self, table: Table, catalog_address: str) -> None:
        self.iceberg: Table = table
        """The table as an object of pyiceberg."""
        self._catalog_address = catalog_address

    @property
    def name(self) -> str:
        """The table's name in the catalog, such as `mansio.flights`."""
        return ".".join(self.iceberg.name())

    def refresh(self) -> None:
        """Reload the table's metadata. Raises `CatalogLocked`, `CatalogUnavailable`, `TableChanged`."""
        with self.catalog_errors():
            refresh_table(self.iceberg)

    def transaction(self) -> CachedMetadataTransaction:
        """Return a transaction for maintenance: `with table.catalog_errors(), table.transaction() as change: ...`.

        A concurrent commit makes it fail with pyiceberg's CommitFailedException: `refresh` and try again.
        """
        return CachedMetadataTransaction(self.iceberg)

    def manifest_count(self) -> int:
        """Return the number of manifests of the current snapshot."""
        snapshot = self.iceberg.current_snapshot()
        return 0 if snapshot is None else len(snapshot.manifests(self.iceberg.io))

    def retry_while_locked(self, commit: Callable[[], Result]) -> Result:
        """Return the result of `commit`. A locked catalog is retried `CATALOG_LOCK_ATTEMPTS_MAX` times; each time the
        committed state is read again.
        """
        for _ in range(CATALOG_LOCK_ATTEMPTS_MAX - 1):
            try:
                with self.catalog_errors():
                    return commit()
            except CatalogLocked:
                with suppress(CatalogLocked):
                    self.refresh()
        with self.catalog_errors():
            return commit()

    def retry_on_conflict(self, attempt: Callable[[], Result]) -> Result:
        """Refresh the table and return the result of `attempt`; for maintenance, see `commit.commit_with_retries`.

        Raises:
            CommitConflict: In every attempt another commit changed the table first.
        """
        conflict = f"others changed {self.name} at the same time, {MAINTENANCE_ATTEMPTS_MAX} times in a row: try again"
        self.refresh()
        with self.catalog_errors():
            return commit_with_retries(
                self.iceberg,
                lambda _number: attempt(),
                conflict,
                retries=MAINTENANCE_ATTEMPTS_MAX - 1,
                backoff_s=MAINTENANCE_BACKOFF_S,
            )

    @contextmanager
    def catalog_errors(self) -> Iterator[None]:
        """Context manager that converts errors of the catalog. See the function `catalog_errors`."""
        with catalog_errors(self._catalog_address):
            yield


def warehouse_location(warehouse: str) -> str:
    """Return the warehouse as an address: a plain path becomes absolute with `file://`.

    Raises:
        ConfigError: The path contains a character of `RESERVED_URI_CHARACTERS`, which readers and writers would
        interpret differently.
    """
    if "://" in warehouse:
        return warehouse.rstrip("/")
    path = os.path.abspath(os.path.expanduser(warehouse))
    reserved = next((one for one in path if one in RESERVED_URI_CHARACTERS), None)
    if reserved is not None:
        raise ConfigError(f"the warehouse {path} has a {reserved} in its name: choose another directory")
    return f"file://{path}"


@contextmanager
def catalog_errors(address: str) -> Iterator[None]:
    """Context manager that converts errors of the catalog: a lock that another program holds to `CatalogLocked`, other
    errors to `CatalogUnavailable`. `address`: the catalog, for the message.
    """
    from requests.exceptions import RequestException
    from sqlalchemy.exc import OperationalError, SQLAlchemyError

    try:
        yield
    except OperationalError as error:
        if "locked" in str(error.orig):
            raise CatalogLocked(
                f"the catalog {_display_address(address)} is locked by another program: "
                f"wait for it or stop it, then try again"
            ) from error
        raise CatalogUnavailable(
            f"the catalog {_display_address(address)} does not work: {error.orig}"
        ) from error
    except (SQLAlchemyError, RESTError, RequestException) as error:
        line = str(error).partition("\n")[0]
        raise CatalogUnavailable(f"the catalog {_display_address(address)} does not work: {line}") from error


def open_catalog(address: str, location: str, *, create: bool) -> Catalog | None:
    """Open the catalog; None if its SQLite file does not exist and `create` is false."""
    if address.startswith("sqlite:"):
        path = urlsplit(address).path[1:]
        if not create and not os.path.exists(path):
            return None
        os.makedirs(os.path.dirname(path), exist_ok=True)
    kind = "rest" if address.startswith(("http://", "https://")) else "sql"
    durable = {"py-io-impl": FILE_IO_CLASS} if location.startswith("file://") else {}
    return load_catalog(CATALOG_NAME, type=kind, uri=address, warehouse=location, **durable)


def create_table(catalog: Catalog, identifier: tuple[str, ...], schema: Schema, **options: Any) -> Table:
    """Create a table and its namespace, and return the table. If another program creates it at the same time, its table
    is returned. `options`: of pyiceberg's `create_table`.
    """
    catalog.create_namespace_if_not_exists(identifier[:-1])
    try:
        return catalog.create_table(identifier, schema, **options)
    except TableAlreadyExistsError:
        return catalog.load_table(identifier)


def sqlite_address(location: str) -> str:
    """Return the address of the SQLite catalog in a warehouse. Raises `CatalogUnavailable` if that is no local
    directory.
    """
    parts = urlsplit(location)
    if parts.scheme != "file":
        raise CatalogUnavailable(
            f"the warehouse {location} is not a directory of this machine: name a catalog"
        )
    return f"sqlite:///{unquote(parts.path)}/{CATALOG_FILE_NAME}?timeout={CATALOG_LOCK_TIMEOUT_S}"


def _display_address(address: str) -> str:
    """Return a catalog's address for messages: the path of a SQLite file, or the address without user and password."""
    parts = urlsplit(address)
    if parts.scheme.startswith("sqlite"):
        return parts.path[1:]
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
