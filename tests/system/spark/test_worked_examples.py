"""Worked examples into Iceberg tables, compared with plain Python: sessions, a slowly changing table, late data."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.catalog import load_catalog

import mansio
from mansio.client.types import OutgoingRecord
from mansio.iceberg.result_table.backfill_ranges import TimeRange
from mansio.iceberg.result_table.table import TableTarget
from mansio.pipelines.backfilling.backfill import BackfillJob, backfill
from mansio.pipelines.lag import pipeline_lag
from mansio.pipelines.run import PipelineJob, run_pipeline
from mansio.spark.sync_client import sync_client
from support.paths import ROOT
from system.spark.topics import create, publish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from mansio.pipelines.pipeline_progress import PipelineProgress
    from mansio.pipelines.run import PipelineResult
    from support.process import ServedBroker

    TopicName = Callable[[str], str]

EXAMPLES = ROOT / "examples" / "pipelines"
MINUTE_MS = 60_000
FIRST_MS = 1_714_557_600_000
"""2024-05-01T10:00:00Z"""


def in_table(warehouse: Path, table: str) -> list[dict[str, Any]]:
    catalog = load_catalog(
        "mansio", type="sql", uri=f"sqlite:///{warehouse}/catalog.db", warehouse=f"file://{warehouse}"
    )
    rows: pa.Table = catalog.load_table(f"mansio.{table}").scan().to_arrow()
    return rows.to_pylist()


def at_ms(time: datetime) -> int:
    return round(time.timestamp() * 1000)


class Example:
    """One example over topics of its own, run as `mansio pipeline run --once` into a table."""

    def __init__(self, spark: SparkSession, broker: ServedBroker, name: str, place: Path) -> None:
        self.spark, self.servers, self.name = spark, broker.bootstrap_servers, name
        self.file, self.place, self.warehouse = EXAMPLES / f"{name}.py", place, place / "lake"

    def run(
        self,
        pipeline: str,
        inputs: tuple[str, ...] = (),
        file: Path | None = None,
        records_max: int | None = None,
    ) -> PipelineResult:
        job = PipelineJob(
            file=str(file or self.file),
            name=pipeline,
            bootstrap_servers=self.servers,
            checkpoint=str(self.place / "checkpoint"),
            inputs=inputs,
            table=TableTarget(self.name, str(self.warehouse)),
            stops_when_caught_up=True,
            records_max=records_max,
        )
        return run_pipeline(self.spark, job)

    def rows(self) -> list[dict[str, Any]]:
        return in_table(self.warehouse, self.name)

    def progress(self, pipeline: str) -> PipelineProgress:
        found = pipeline_lag(sync_client(self.servers), pipeline)[0].progress
        assert found is not None
        return found


def publish_clicks(servers: str, topic: str, clicks: Iterable[tuple[str, str, int]]) -> None:
    """Publish clicks (visitor, page, minute), each with its time as the record's timestamp."""
    for visitor, page, minute in clicks:
        when = FIRST_MS + minute * MINUTE_MS
        text = datetime.fromtimestamp(when / 1000, UTC).isoformat()
        value = json.dumps({"page": page, "at": text}).encode()
        publish(servers, topic, [(visitor.encode(), value)], timestamp_ms=when)


@pytest.mark.full
@pytest.mark.row("S0")
def test_sessions_of_visitors_are_in_the_table_once_each_when_they_are_final(
    spark: SparkSession, broker_process: ServedBroker, topic_name: TopicName, tmp_path: Path
) -> None:
    example = Example(spark, broker_process, "clickstream_sessions", tmp_path)
    clicks_topic = create(example.servers, topic_name("clicks"), 2, retention_ms="-1")
    pipeline, chance = topic_name("sessions"), random.Random(5)
    clicks = [(f"v{chance.randrange(4)}", f"/p{n}", n * 4 + chance.randrange(4)) for n in range(60)]
    halves = clicks[:30], clicks[30:]
    for half in halves:
        publish_clicks(example.servers, clicks_topic, chance.sample(half, len(half)))
        example.run(pipeline, (clicks_topic,))
    newest = max(minute for _, _, minute in clicks)
    publish_clicks(example.servers, clicks_topic, [("last", "/", newest + 100)])
    example.run(pipeline, (clicks_topic,))
    example.run(pipeline, (clicks_topic,))

    expected = []
    for visitor in {visitor for visitor, _, _ in clicks}:
        own = sorted((minute, page) for who, page, minute in clicks if who == visitor)
        session: list[tuple[int, str]] = []
        for minute, page in own:
            if session and minute - session[-1][0] > 30:
                expected.append((visitor, session))
                session = []
            session = [*session, (minute, page)]
        expected.append((visitor, session))
    found = [
        (row["visitor"], at_ms(row["started"]), at_ms(row["ended"]), row["clicks"], row["pages"])
        for row in example.rows()
    ]
    assert sorted(found) == sorted(
        (
            visitor,
            FIRST_MS + session[0][0] * MINUTE_MS,
            FIRST_MS + session[-1][0] * MINUTE_MS,
            len(session),
            [page for _, page in session],
        )
        for visitor, session in expected
    )
    assert len(found) > 4, "some visitors have several"
    assert example.progress(pipeline).state_rows > 0, "the session of the last click is not final"


@pytest.mark.full
def test_orders_have_the_tier_that_their_customer_had_whatever_is_read_first(
    spark: SparkSession, broker_process: ServedBroker, topic_name: TopicName, tmp_path: Path
) -> None:
    example = Example(spark, broker_process, "orders_with_customers", tmp_path)
    orders = create(example.servers, topic_name("orders"), 2, retention_ms="-1")
    customers = create(example.servers, topic_name("customers"), 1, cleanup_policy="compact")
    file = tmp_path / "orders_with_customers.py"
    text = example.file.read_text().replace('read("orders")', f'read("{orders}")')
    file.write_text(text.replace('read("customers")', f'read("{customers}")'))
    pipeline, chance = topic_name("orders"), random.Random(6)
    changes: dict[str, list[tuple[int, str]]] = defaultdict(list)

    def change(customer: str, tier: str, minute: int) -> None:
        changes[customer].append((minute, tier))
        value = json.dumps({"tier": tier}).encode()
        publish(
            example.servers, customers, [(customer.encode(), value)], 0, FIRST_MS + minute * MINUTE_MS + 1
        )

    bought: dict[int, tuple[str, int]] = {}

    def order(customer: str, minute: int) -> None:
        number = len(bought)
        bought[number] = customer, minute
        value = json.dumps({"order": number, "amount": number / 2}).encode()
        publish(
            example.servers, orders, [(customer.encode(), value)], timestamp_ms=FIRST_MS + minute * MINUTE_MS
        )

    for number in range(20):
        order(f"c{number % 3}", 10 + number)
    for customer in ("c0", "c1"):  # of c2 nothing is known at first
        change(customer, "bronze", 0)
    change("c0", "silver", 20)
    example.run(pipeline, file=file)
    change("c1", "gold", 28)
    change("c2", "bronze", 29)
    for number in range(20):
        order(f"c{chance.randrange(3)}", 30 + number)
    example.run(pipeline, file=file)
    order("c0", 120)
    example.run(pipeline, file=file)
    example.run(pipeline, file=file)

    last = len(bought) - 1
    expected = {}
    for number, (customer, minute) in bought.items():
        known = [tier for since, tier in sorted(changes[customer]) if since < minute]
        expected[number] = customer, minute, number / 2, known[-1] if known else None
    found = {
        row["order"]: (
            row["customer"],
            (at_ms(row["at"]) - FIRST_MS) // MINUTE_MS,
            row["amount"],
            row["tier"],
        )
        for row in example.rows()
    }
    assert len(example.rows()) == len(found), "each order once"
    del expected[last]  # it waits
    assert found == expected
    assert {one[3] for one in found.values()} == {"bronze", "silver", "gold", None}


@pytest.mark.full
def test_no_order_is_late_and_each_has_its_tier_whatever_the_limit_of_a_batch(
    spark: SparkSession, broker_process: ServedBroker, topic_name: TopicName, tmp_path: Path
) -> None:
    """A large and a small topic of the same time, read in small batches, then both again after an outage. Spark drops
    late rows from the third batch on: it compares them with the watermark of the batch before the previous one.
    """
    example = Example(spark, broker_process, "orders_with_customers", tmp_path)
    orders = create(example.servers, topic_name("orders"), 2, retention_ms="-1")
    customers = create(example.servers, topic_name("customers"), 1, cleanup_policy="compact")
    file = tmp_path / "orders_with_customers.py"
    text = example.file.read_text().replace('read("orders")', f'read("{orders}")')
    file.write_text(text.replace('read("customers")', f'read("{customers}")'))
    pipeline, changes_per_order, step_minutes = topic_name("limited"), 20, 3
    bought: list[tuple[str, int]] = []
    changes: dict[str, list[tuple[int, str]]] = defaultdict(list)

    def publish_until(count: int) -> None:
        """Publish all orders with a smaller number, three minutes apart, and a change after every twentieth."""
        of_orders, of_customers = [], []
        for number in range(len(bought), count):
            customer, minute = f"c{number % 5}", number * step_minutes
            if number % changes_per_order == 0:
                who, tier = f"c{number // changes_per_order % 5}", f"tier {number}"
                changes[who].append((minute, tier))
                when = FIRST_MS + minute * MINUTE_MS - MINUTE_MS
                value = json.dumps({"tier": tier}).encode()
                of_customers.append(OutgoingRecord(value, key=who.encode(), timestamp_ms=when))
            bought.append((customer, minute))
            value = json.dumps({"order": number, "amount": 1.0}).encode()
            when = FIRST_MS + minute * MINUTE_MS
            of_orders.append(OutgoingRecord(value, key=customer.encode(), timestamp_ms=when))
        with mansio.blocking.connect(example.servers) as client:
            client.publish_many(orders, of_orders)
            client.publish_many(customers, of_customers)

    results = []
    for count, records_max in ((400, 150), (600, 150)):
        publish_until(count)
        results.append(example.run(pipeline, file=file, records_max=records_max))
    assert [result.late_rows for result in results] == [0, 0]
    assert [result.batches >= least for result, least in zip(results, (3, 2), strict=True)] == [True, True]
    found = {row["order"]: (row["customer"], row["tier"]) for row in example.rows()}
    assert len(example.rows()) == len(found), "each order once"
    expected = {}
    for number, (customer, minute) in enumerate(bought):
        known = [tier for since, tier in changes[customer] if since <= minute]
        expected[number] = customer, known[-1] if known else None
    waiting = {number for number in expected if number not in found}
    assert waiting <= {598, 599}, "those within the delay of the watermark"
    assert found == {number: one for number, one in expected.items() if number not in waiting}


@pytest.mark.full
def test_late_data_are_counted_and_a_backfill_gives_the_complete_numbers(
    spark: SparkSession, broker_process: ServedBroker, topic_name: TopicName, tmp_path: Path
) -> None:
    example = Example(spark, broker_process, "page_views", tmp_path)
    topic, pipeline = create(example.servers, topic_name("clicks"), retention_ms="-1"), topic_name("views")

    def views(rows: list[dict[str, Any]]) -> Counter[tuple[int, str]]:
        assert len(rows) == len({(row["since"], row["page"]) for row in rows}), "each window once"
        return Counter(
            {((at_ms(row["since"]) - FIRST_MS) // MINUTE_MS, row["page"]): row["views"] for row in rows}
        )

    def counted(clicks: list[tuple[str, str, int]]) -> Counter[tuple[int, str]]:
        return Counter((minute // 10 * 10, page) for _, page, minute in clicks)

    in_time = [("v", f"/p{minute % 2}", minute) for minute in range(30)]
    publish_clicks(example.servers, topic, in_time)
    example.run(pipeline, (topic,))
    late = [("v", "/p0", 2), ("v", "/p0", 3), ("v", "/p1", 12)]
    accepted = ("v", "/p1", 26)  # behind the newest, but not behind the watermark
    publish_clicks(example.servers, topic, [*late, accepted, ("v", "/end", 100)])
    dropped = example.run(pipeline, (topic,)).late_rows
    assert example.progress(pipeline).late_rows == dropped
    publish_clicks(example.servers, topic, [("v", "/end", 200)])
    example.run(pipeline, (topic,))
    written = views(example.rows())
    assert {place: count for place, count in written.items() if place[0] < 30} == counted(
        [*in_time, accepted]
    )
    assert dropped > 0

    target = TableTarget("page_views_complete", str(example.warehouse))
    job = BackfillJob(
        str(example.file),
        "complete",
        example.servers,
        TimeRange(FIRST_MS, FIRST_MS + 150 * MINUTE_MS),
        target,
        inputs=(topic,),
    )
    for _ in range(2):
        backfill(spark, job)
        complete = views(in_table(example.warehouse, "page_views_complete"))
        assert complete == counted([*in_time, *late, accepted, ("v", "/end", 100)])
