"""What makes `format("mansio")` known to Spark: it looks into every package whose name begins with `pyspark_`."""

from mansio.spark.data_source import MansioSource as DefaultSource

__all__ = ["DefaultSource"]
