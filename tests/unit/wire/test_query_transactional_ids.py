"""Transactional ids of queries: each belongs to one query."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.spark.options import SinkOptions
from mansio.wire.query_transactional_ids import query_id_of, task_transactional_id, transactional_id_prefix

QUERY_IDS = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True)


@given(QUERY_IDS, QUERY_IDS, st.integers(0, 10_000), st.integers(0, 100))
def test_each_id_names_its_query_and_is_no_other_querys(
    query_id: str, other: str, task: int, slot: int
) -> None:
    name = task_transactional_id(query_id, task, slot)
    assert query_id_of(name) == query_id
    assert name.startswith(transactional_id_prefix(other)) == (query_id == other)
    servers = {"kafka.bootstrap.servers": "b:9092", "topic": "t", "batchId": "1"}
    assert SinkOptions.parse({**servers, "queryId": query_id}).query_id == query_id


@pytest.mark.parametrize(
    "name", ["orders-1", "mansio-spark:q:0", "mansio-spark::0:0", "mansio-spark:q:a:0", "mansio-mirror:q:0:0"]
)
def test_ids_of_other_producers_name_no_query(name: str) -> None:
    assert query_id_of(name) is None
