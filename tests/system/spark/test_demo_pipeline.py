"""The demo's second chapter, short: archive while flights come in, deletion up to the hold, one table, a day again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from mansio_demo.delay_chart import Mean, chart_svg, differences
from mansio_demo.pipeline_demo import run_demo

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

COUNT = 8_000


@pytest.mark.row("S3", "S4", "S5", "T4")
def test_the_demo_finds_every_number_right(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "delays.svg"
    proofs = asyncio.run(run_demo(COUNT, str(plot)))
    shown = capsys.readouterr().out
    assert all(each.holds for each in proofs), shown
    assert "7,332 flights until November" in shown
    assert "668 flights of December follow" in shown
    assert "8,000 flights" in shown
    assert "23 flights replayed" in shown
    assert "a repeated replay adds 0" in shown
    assert spark.range(1).count() == 1, "a session that was there before stays"
    texts = [element.text for element in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")]
    assert {"Jan", "Dec", "UA", "EV"} <= set(texts)


def test_a_wrong_mean_a_lost_flight_and_a_missing_carrier_are_differences() -> None:
    expected = {("UA", 1): Mean(10, 4.0), ("EV", 1): Mean(3, None)}
    assert differences(expected, dict(expected)) == []
    assert differences(expected, expected | {("UA", 1): Mean(10, 4.0 + 1e-12)}) == []
    assert differences(expected, expected | {("UA", 1): Mean(10, 4.001)}) == [("UA", 1)]
    assert differences(expected, expected | {("UA", 1): Mean(9, 4.0)}) == [("UA", 1)]
    assert differences(expected, expected | {("EV", 1): Mean(3, 0.0)}) == [("EV", 1)]
    assert differences(expected, {("UA", 1): Mean(10, 4.0), ("AA", 2): Mean(1, 1.0)}) == [
        ("AA", 2),
        ("EV", 1),
    ]
    ElementTree.fromstring(chart_svg(expected, "t"))
