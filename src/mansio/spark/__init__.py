"""Spark integration: the data source `format("mansio")` for batch and streaming reads and writes, and Spark jobs.

>>> from mansio.spark import session
>>> spark = session()  # a local session; other masters: session("spark://host:7077")
>>> options = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "flights"}
>>> flights = spark.readStream.format("mansio").options(**options).load()

Invariants:
* Importing this module needs neither pyspark nor Java. The module of a job is imported when the job is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mansio.host.extras import require_extra
from mansio.spark.session import session

if TYPE_CHECKING:
    from mansio.spark.jobs.archive import archive
    from mansio.spark.jobs.replay import replay
    from mansio.spark.jobs.topic_table import read_topic_as_table

__all__ = ["archive", "read_topic_as_table", "replay", "session"]

_JOBS = {"archive": "archive", "read_topic_as_table": "topic_table", "replay": "replay"}
"""The module in `mansio.spark.jobs` that defines each exported function."""


def __getattr__(name: str) -> Any:
    if name not in _JOBS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_extra("iceberg" if name == "replay" else "spark")  # a replay works without Spark
    return getattr(import_module(f".jobs.{_JOBS[name]}", __name__), name)
