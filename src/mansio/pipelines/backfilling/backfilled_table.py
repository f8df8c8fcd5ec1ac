"""The table of a backfill before the backfill: which ranges it has, and whether another one can be added.

Needs no Spark, so that a backfill that cannot succeed is refused before Spark starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyiceberg.exceptions import NoSuchTableError

from mansio.errors import ConfigError
from mansio.iceberg.catalog import catalog_errors
from mansio.iceberg.errors import NotAnArchiveTable
from mansio.iceberg.result_table.backfill_ranges import (
    RANGES_PROPERTY,
    BackfilledRange,
    parse_ranges,
    with_range,
)
from mansio.iceberg.result_table.table_name import open_catalog, parse_table_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.iceberg.result_table.backfill_ranges import TimeRange
    from mansio.iceberg.result_table.table import TableTarget


def check_backfill(
    target: TableTarget,
    pipeline: str,
    inputs: Sequence[str],
    times: TimeRange,
    spark_settings: Mapping[str, str],
    *,
    extends: bool,
) -> None:
    """Check that a backfill can be added to its table. `inputs`: its topics; empty if they are not known yet.

    A table whose catalog is configured in Spark only is not checked here. Raises `InvalidRequest` as `with_range`, and
    the errors of `known_ranges`.
    """
    try:
        known = known_ranges(target, spark_settings)
    except ConfigError:
        if parse_table_name(target.name).catalog:
            return
        raise
    if known:
        wanted = BackfilledRange(pipeline, tuple(inputs) or known[0].topics, times)
        with_range(known, wanted, target.name, extends=extends)


def known_ranges(target: TableTarget, spark_settings: Mapping[str, str]) -> tuple[BackfilledRange, ...]:
    """Return the ranges of an existing table; none if it does not exist or has no rows.

    Raises:
        NotAnArchiveTable: The table has rows that no backfill has written.
        ConfigError, CatalogLocked, CatalogUnavailable: As in `open_result_table`.
    """
    name = parse_table_name(target.name)
    opened = open_catalog(name, target.warehouse, spark_settings)
    with catalog_errors(opened.address):
        try:
            table = opened.catalog.load_table(name.identifier)
        except NoSuchTableError:
            return ()
        stored = table.properties.get(RANGES_PROPERTY)
        if stored is None and table.current_snapshot() is not None:
            raise NotAnArchiveTable(
                f"table {name} has rows that `mansio pipeline backfill` has not written: choose another one with"
                " --to-table"
            )
    return parse_ranges(stored)
