"""Spark integration: the data source `format("mansio")` (batch and stream, read and write), archive and jobs.

>>> from mansio.spark import session
>>> spark = session()                                  # finds Java; local[*], or any master
>>> options = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "flights"}
>>> flights = spark.readStream.format("mansio").options(**options).load()

Invariants:
* Importing this module needs neither pyspark nor Java; jobs are imported at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mansio.spark.session import session

if TYPE_CHECKING:
    from mansio.spark.jobs.archive import archive
    from mansio.spark.jobs.replay import replay
    from mansio.spark.jobs.topic_table import read_topic_as_table

__all__ = ["archive", "read_topic_as_table", "replay", "session"]

_JOBS = {"archive": "archive", "read_topic_as_table": "topic_table", "replay": "replay"}
"""Name: its module in `jobs`, imported at the first use."""


def __getattr__(name: str) -> Any:
    if name not in _JOBS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".jobs.{_JOBS[name]}", __name__), name)
