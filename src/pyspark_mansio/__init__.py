"""Registers `format("mansio")`: Spark searches packages whose name begins with `pyspark_`."""

from mansio.spark.data_source import MansioSource as DefaultSource

__all__ = ["DefaultSource"]
