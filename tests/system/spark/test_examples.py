"""The worked examples are run as they stand over real flights, and their results compared with plain Python."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from mansio.pipelines.run import PipelineJob, run_pipeline
from support.paths import ROOT
from system.spark.flights import flights, records, weather
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from support.process import ServedBroker

    TopicName = Callable[[str], str]
    Example = Callable[..., list[tuple[bytes | None, dict[str, Any]]]]

EXAMPLES = ROOT / "examples" / "pipelines"


@pytest.fixture(scope="module")
def inputs(broker_process: ServedBroker) -> None:
    """The topics by the names that the examples use; one partition, so that the year goes by in order."""
    for topic, rows in (("flights", flights()), ("weather", weather())):
        create(broker_process.bootstrap_servers, topic)
        publish(broker_process.bootstrap_servers, topic, records(rows))


@pytest.fixture
def example(
    spark: SparkSession, broker_process: ServedBroker, inputs: None, topic_name: TopicName, tmp_path: Path
) -> Example:
    """Run one of the files and return (key, value) of what it wrote."""

    def run_it(name: str, **more: Any) -> list[tuple[bytes | None, dict[str, Any]]]:
        target = topic_name("out")
        job = PipelineJob(
            file=str(EXAMPLES / f"{name}.py"),
            name=target,
            bootstrap_servers=broker_process.bootstrap_servers,
            checkpoint=str(tmp_path / "checkpoint"),
            topic=target,
            stops_when_caught_up=True,
            **more,
        )
        run_pipeline(spark, job)
        found = contents(broker_process.bootstrap_servers, target)
        return [(message.key, json.loads(message.value or b"")) for message in found]

    return run_it


def number(text: str) -> float | None:
    return None if text == "NA" else float(text)


@pytest.mark.full
def test_late_flights_are_those_that_left_a_quarter_of_an_hour_late(example: Example) -> None:
    found = example("late_flights", inputs=("flights",))
    late = [row for row in flights() if (number(row["dep_delay"]) or 0) >= 15]
    assert len(found) == len(late) > 100
    expected = sorted(
        (row["tailnum"].encode(), row["carrier"] + row["flight"], int(row["dep_delay"])) for row in late
    )
    assert sorted((key, one["flight"], one["minutes_late"]) for key, one in found) == expected
    assert {one["outcome"] for _, one in found} == {"made up", "arrived late"}


@pytest.mark.full
def test_carrier_delays_are_the_means_of_each_day_and_carrier_where_the_weather_is_known(
    example: Example,
) -> None:
    found = example("carrier_delays")
    known = {(row["origin"], row["time_hour"]): row for row in weather()}
    delays: dict[tuple[str, str], list[float]] = defaultdict(list)
    winds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in flights():
        there = known.get((row["origin"], row["time_hour"]))
        if there is not None and row["dep_delay"] != "NA":
            place = row["time_hour"][:10], row["carrier"]
            delays[place].append(float(row["dep_delay"]))
            winds[place] += [] if there["wind_speed"] == "NA" else [float(there["wind_speed"])]
    first_day = {place for place in delays if place[0] == "2013-01-01"}
    written = {(one["day"], one["carrier"]): one for _, one in found}
    assert len(written) == len(found), "a day is written once, when it is final"
    assert first_day <= written.keys() <= delays.keys()
    for place, one in written.items():
        assert one["flights"] == len(delays[place])
        assert one["mean_delay_minutes"] == pytest.approx(sum(delays[place]) / len(delays[place]), abs=0.001)
        assert one["mean_wind_mph"] == pytest.approx(sum(winds[place]) / len(winds[place]), abs=0.001)


@pytest.mark.full
def test_knock_on_delays_are_found_across_batches(example: Example) -> None:
    found = example("knock_on_delays", inputs=("flights",), records_max=1_500)
    last: dict[str, tuple[str, float]] = {}
    expected = []
    for row in flights():
        if row["tailnum"] == "NA" or row["arr_delay"] == "NA":
            continue
        last_day, arrived_late = last.get(row["tailnum"], ("", 0.0))
        if row["day"] == last_day and arrived_late >= 15 and float(row["dep_delay"]) >= 15:
            expected.append((row["tailnum"], row["carrier"] + row["flight"], int(arrived_late)))
        last[row["tailnum"]] = (row["day"], float(row["arr_delay"]))
    got = [((key or b"").decode(), one["flight"], one["arrived_late_before"]) for key, one in found]
    assert sorted(got) == sorted(expected)
    assert len(expected) > 0
