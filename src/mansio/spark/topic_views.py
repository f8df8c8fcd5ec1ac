"""Views of Spark SQL over topics: archived and unarchived records, as of each query.

A view is a temporary one of the session. It reads `format("mansio")` with the option `asTable`, which determines files
and offsets for each query. Spark's catalog cannot hold such a table: when a table is read, Spark 4.1 to 4.3 do not pass
its options to a data source in Python.

Invariants:
* The columns are determined when the view is created; register the topic again to see later fields of its schema.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mansio.errors import ConfigError
from mansio.spark.options import BOOTSTRAP_SERVERS_OPTION, SourceOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

_INVALID_CHARACTERS = re.compile(r"[^A-Za-z0-9_]")


def register_topics(
    spark: SparkSession,
    topics: Sequence[str],
    bootstrap_servers: str,
    *,
    warehouse: str | None = None,
    catalog: str | None = None,
    options: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Make each topic a temporary view of the session, with the columns of `format("mansio")`. Returns the view's name
    by topic: the topic's name, with `_` for characters that a name of Spark SQL cannot have.

    `warehouse`, `catalog`: of the archives; archived records are read from them. Without a warehouse a view has the
    records of the log. `options`: further options of a batch read (`valueFormat`, `schemaRegistry`, `columns`, ...). A
    temporary view of the same name is replaced.

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
        SourceOptions.parse(chosen)
        spark.read.format("mansio").options(**chosen).load().createOrReplaceTempView(name)
    return names


def _location(warehouse: str) -> str:
    from mansio.iceberg.catalog import warehouse_location

    return warehouse_location(warehouse)
