"""The session that `mansio.spark.session` creates runs and has the configuration that other modules need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mansio.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.full
def test_session_counts_through_jvm_and_python_with_the_settings_that_source_and_sink_rely_on(
    spark: SparkSession,
) -> None:
    assert spark.range(10).mapInArrow(lambda batches: batches, "id long").count() == 10
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.sparkContext.master == "local[2]"
    assert session() is spark, "a process has one session"
