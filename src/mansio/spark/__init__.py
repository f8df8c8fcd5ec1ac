"""Mansio for Spark: `format("mansio")` for reading and writing, batch and stream, and what goes with it.

>>> from mansio.spark import session
>>> spark = session()                                  # finds Java; local[*], or any master
>>> flights = spark.readStream.format("mansio").option("broker", "127.0.0.1:9092").option("subscribe", "flights").load()

Always true: importing this needs neither pyspark nor Java; the jobs are imported when they are first named.
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

_JOBS = {"archive": "archive", "read_topic_as_table": "union", "replay": "replay"}
"""What is in which module of `pipelines`."""


def __getattr__(name: str) -> Any:
    if name not in _JOBS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".pipelines.{_JOBS[name]}", __name__), name)
