"""Orders as they were decoded, with their place in the topic: the columns of the Iceberg table `shop.sales`."""

from pyspark.sql import DataFrame


def transform(frame: DataFrame) -> DataFrame:
    """The fields of each order, its partition and its offset."""
    return frame.select("decoded_value.*", "partition", "offset")
