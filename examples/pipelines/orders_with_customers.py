"""Orders beside the customer as it was at the time of the order: a stream joined with a slowly changing table.

    mansio pipeline run examples/pipelines/orders_with_customers.py --to-table orders_by_tier --warehouse lake

Reads the topics `orders` (JSON such as {"order": 17, "amount": 3.5}) and `customers` (JSON such as {"tier": "gold"}, a
compacted topic), both keyed by customer. An order waits until the watermark has passed it: until then an earlier change
of its customer may still arrive. So the result does not depend on the order in which the two topics are read. The state
of a customer is its waiting orders, the version that is valid at the watermark, and later versions. The watermark is
that of both topics together, so a quiet table does not hold orders back.

A backfill reads the customers from their beginning: `mansio pipeline backfill ... --whole-topic customers`.
"""

from collections.abc import Callable, Iterator

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

ORDER = "order bigint, amount double"
CUSTOMER = "tier string"
OUTPUT = "customer string, at_ms bigint, order bigint, amount double, tier string"
LATENESS = "5 minutes"


class Customer(StatefulProcessor):
    """The versions of one customer, and its orders that wait for the watermark."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Called before the first rows of a partition."""
        self.handle = handle
        self.versions = handle.getListState("versions", "at_ms bigint, tier string")
        self.orders = handle.getListState("orders", "at_ms bigint, order bigint, amount double")

    def handleInputRows(  # noqa: N802  # Spark's names
        self,
        key: tuple[str],  # noqa: ARG002
        rows: Iterator[Row],
        timerValues: TimerValues,  # noqa: ARG002, N803
    ) -> Iterator[Row]:
        """New orders and new versions of one customer."""
        orders, versions = [], []
        for row in rows:
            if row.order is None:
                versions.append((row.at_ms, row.tier))
            else:
                orders.append((row.at_ms, row.order, row.amount))
                self.handle.registerTimer(row.at_ms)
        if orders:
            self.orders.appendList(orders)
        if versions:
            self.versions.appendList(versions)
        return iter(())

    def handleExpiredTimer(  # noqa: N802
        self,
        key: tuple[str],
        timerValues: TimerValues,  # noqa: N803
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: ARG002, N803
    ) -> Iterator[Row]:
        """The orders that the watermark has passed, each with the version of its time."""
        watermark_ms = timerValues.getCurrentWatermarkInMs()
        versions = sorted((one[0], one[1]) for one in self.versions.get())
        waiting = []
        for at_ms, order, amount in sorted((one[0], one[1], one[2]) for one in self.orders.get()):
            if at_ms > watermark_ms:
                waiting.append((at_ms, order, amount))
                continue
            yield Row(customer=key[0], at_ms=at_ms, order=order, amount=amount, tier=tier_at(versions, at_ms))
        past = [one for one in versions if one[0] <= watermark_ms]
        replace(self.orders, waiting)
        replace(self.versions, past[-1:] + versions[len(past) :])

    def close(self) -> None:
        """Nothing is open."""


def tier_at(versions: list[tuple[int, str]], at_ms: int) -> str | None:
    """The tier of the last version at or before this time; None if there is none."""
    return next((tier for since_ms, tier in reversed(versions) if since_ms <= at_ms), None)


def replace(state, rows: list[tuple]) -> None:  # noqa: ANN001  # Spark has no public name for this class
    """Replace the rows of a list; Spark refuses to store an empty list."""
    state.clear()
    if rows:
        state.put(rows)


def pipeline(_spark: SparkSession, read: Callable[..., DataFrame]) -> DataFrame:
    """Orders with the tier that their customer had."""
    orders, customers = read("orders"), read("customers")
    order = f.from_json(orders.value.cast("string"), ORDER)
    customer = f.from_json(customers.value.cast("string"), CUSTOMER)
    place = f.col("key").cast("string").alias("customer")
    changes = customers.select(place, "timestamp", customer.alias("row")).select(
        "customer",
        "timestamp",
        f.lit(None).cast("bigint").alias("order"),
        f.lit(None).cast("double").alias("amount"),
        "row.tier",
    )
    bought = orders.select(place, "timestamp", order.alias("row")).select(
        "customer", "timestamp", "row.order", "row.amount", f.lit(None).cast("string").alias("tier")
    )
    joined = (
        bought.where("order is not null")
        .unionByName(changes)
        .withWatermark("timestamp", LATENESS)
        .withColumn("at_ms", f.unix_millis("timestamp"))
        .groupBy("customer")
        .transformWithState(
            statefulProcessor=Customer(), outputStructType=OUTPUT, outputMode="append", timeMode="eventTime"
        )
    )
    return joined.select("customer", f.timestamp_millis("at_ms").alias("at"), "order", "amount", "tier")
