"""Deliveries of a topic as a task of Spark reads them, without a JVM."""

from __future__ import annotations

import pyarrow as pa

from mansio.spark.options import SourceOptions
from mansio.spark.trace.deliveries import DELIVERY_SCHEMA
from mansio.spark.trace.delivery_reader import DeliveryReader


def deliveries(servers: str, topic: str, **options: str) -> pa.Table:
    """The deliveries of a topic, read by all tasks one after the other."""
    chosen = {"kafka.bootstrap.servers": servers, "subscribe": topic, "deliveries": "true", **options}
    reader = DeliveryReader(SourceOptions.parse(chosen), DELIVERY_SCHEMA.names)
    batches = [batch for task in reader.partitions() for batch in reader.read(task)]
    return pa.Table.from_batches(batches, DELIVERY_SCHEMA)
