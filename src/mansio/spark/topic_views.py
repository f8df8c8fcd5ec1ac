"""Views of Spark SQL over topics: archived and unarchived records, as of each query.

A view is a temporary one of the session. It reads `format("mansio")` with the option `asTable`, which determines files
and offsets for each query. Spark's catalog cannot hold such a table: when a table is read, Spark 4.1 to 4.3 do not pass
its options to a data source in Python.

Beside the view of a topic there can be one of the deliveries of its records, with `$deliveries` behind its name. It is
joined with the topic by partition and offset, also of records that only the archive has.

Invariants:
* The columns are determined when the view is created; register the topic again to see later fields of its schema.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from mansio.errors import ConfigError
from mansio.spark.options import (
    BOOTSTRAP_SERVERS_OPTION,
    DELIVERIES_OPTION,
    RECORD_STATES_OPTION,
    SourceOptions,
    is_record_option,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

_INVALID_CHARACTERS = re.compile(r"[^A-Za-z0-9_]")
DELIVERIES_SUFFIX: Final = "$deliveries"
STATES_SUFFIX: Final = "$states"


def register_topics(
    spark: SparkSession,
    topics: Sequence[str],
    bootstrap_servers: str,
    *,
    warehouse: str | None = None,
    catalog: str | None = None,
    options: Mapping[str, str] | None = None,
    deliveries: bool = False,
    states_of: str | None = None,
) -> dict[str, str]:
    """Make each topic a temporary view of the session, with the columns of `format("mansio")`. Returns the view's name
    by topic: the topic's name, with `_` for characters that a name of Spark SQL cannot have.

    `warehouse`, `catalog`: of the archives; archived records are read from them. Without a warehouse a view has the
    records of the log. `options`: further options of a batch read (`valueFormat`, `schemaRegistry`, `columns`, ...). A
    temporary view of the same name is replaced.

    `deliveries`: also make the deliveries of each topic's records a view, whose name is that of the topic's view with
    `$deliveries` behind it; SQL needs backquotes around it. A query of it needs READ on `__mansio_trace`, too. Options
    about the content of records do not apply to it.

    `states_of`: a share group; also make the states of each topic's records in it a view, with `$states` behind the
    name: which are leased by whom and until when, wait for a retry, or are dead-lettered.

    Raises `ConfigError`, and the errors of `format("mansio")` as Spark reports them.
    """
    names: dict[str, str] = {}
    for topic in topics:
        name = _INVALID_CHARACTERS.sub("_", topic)
        if name.lower() in {one.lower() for one in names.values()}:
            raise ConfigError(
                f"two of the topics would have the name {name}: register them in different sessions"
            )
        names[topic] = name
    for topic, name in names.items():
        chosen = {
            **(options or {}),
            BOOTSTRAP_SERVERS_OPTION: bootstrap_servers,
            "subscribe": topic,
            "asTable": "true",
            **({} if warehouse is None else {"warehouse": _location(warehouse)}),
            **({} if catalog is None else {"catalog": catalog}),
        }
        _register(spark, name, chosen)
        shared = {key: text for key, text in chosen.items() if not is_record_option(key)}
        if deliveries:
            _register(spark, f"{name}{DELIVERIES_SUFFIX}", {**shared, DELIVERIES_OPTION: "true"})
        if states_of is not None:
            _register(spark, f"{name}{STATES_SUFFIX}", {**shared, RECORD_STATES_OPTION: states_of})
    return names


def _register(spark: SparkSession, name: str, options: Mapping[str, str]) -> None:
    SourceOptions.parse(options)
    spark.read.format("mansio").options(**options).load().createOrReplaceTempView(f"`{name}`")


def _location(warehouse: str) -> str:
    from mansio.iceberg.catalog import warehouse_location

    return warehouse_location(warehouse)
