"""Spark's tasks log in with a delegation token that the driver gets: only processes of the driver have the password."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

import mansio.blocking
from mansio.api.kafka.connections.request_context import RequestContext
from mansio.api.kafka.handlers import fetch, produce
from mansio.api.kafka.server import listener
from mansio.spark import start_available_now
from mansio.wire.api_versions import ApiKey
from support.machine import scaled
from support.sasl_broker import sasl_broker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

USER, PASSWORD = "alice", "correct horse"
ROWS = 200
OF_TASKS = (ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.INIT_PRODUCER_ID, ApiKey.PREPARE_TRANSACTION)
"""Requests that only tasks send here."""
DEADLINE_S = 60

pytestmark = pytest.mark.full


def plans(frame: DataFrame) -> str:
    frame.explain(extended=True)
    return str(frame._jdf.queryExecution().toString())


def note_session(
    handler: Callable[..., Any], key: ApiKey, log_ins: dict[int, set[str]]
) -> Callable[..., Any]:
    """Return a handler of the listener that notes with which credential its client has logged in."""

    def noted(service: Any, connection: Any, *arguments: Any, **named: Any) -> Any:
        if connection.session.user == USER:
            log_ins[key].add(connection.session.credential_id)
        return handler(service, connection, *arguments, **named)

    return noted


def test_tasks_of_reads_writes_and_streams_log_in_with_one_token(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    key_file = tmp_path / "secrets.key"
    key_file.write_text("5a" * 32)
    key_file.chmod(0o600)
    log_ins: dict[int, set[str]] = defaultdict(set)

    def noted(*arguments: Any, **named: Any) -> RequestContext:
        context = RequestContext(*arguments, **named)
        if context.session.user == USER:
            log_ins[context.api_key].add(context.session.credential_id)
        return context

    with sasl_broker(tmp_path / "data", secrets_key_file=str(key_file)) as broker:
        broker.set_user(USER, PASSWORD)
        options = {
            "kafka.bootstrap.servers": broker.address,
            "tls": "false",
            "user": USER,
            "password": PASSWORD,
        }
        with mansio.blocking.connect(broker.address, tls=False, user=USER, password=PASSWORD) as client:
            for topic in ("orders", "copy"):
                client.admin.create_topic(topic, partitions=2)
            monkeypatch.setattr(listener, "RequestContext", noted)
            for module, name, key in (
                (fetch, "fetch", ApiKey.FETCH),
                (produce, "produce", ApiKey.PRODUCE),
            ):
                monkeypatch.setattr(module, name, note_session(getattr(module, name), key, log_ins))
            rows = spark.range(ROWS).selectExpr("cast(id as string) as key", "cast(id as string) as value")
            rows.write.format("mansio").options(**options, topic="orders").mode("append").save()
            read = spark.read.format("mansio").options(**options, subscribe="orders").load()
            assert read.count() == ROWS
            copied = (
                spark.readStream.format("mansio")
                .options(**options, subscribe="orders", startingOffsets="earliest")
                .options(maxOffsetsPerTrigger=str(ROWS // 2), stopAtLatest="true")
                .load()
                .selectExpr("key", "value")
                .writeStream.format("mansio")
                .options(**options, topic="copy", checkpointLocation=str(tmp_path / "checkpoint"))
            )
            query = start_available_now(copied)
            assert query.awaitTermination(int(scaled(DEADLINE_S)))
            assert query.exception() is None
            (token,) = client.admin.tokens.list()
            copy = spark.read.format("mansio").options(**options, subscribe="copy").load()
            assert copy.count() == ROWS
            shown = (
                plans(read)
                + plans(copy)
                + "".join(one.json for one in query.recentProgress)
                + "".join(capfd.readouterr())
            )
    assert {api: log_ins[api] for api in OF_TASKS} == {api: {token.token_id} for api in OF_TASKS}
    assert log_ins[ApiKey.CREATE_DELEGATION_TOKEN] == {""}
    stored = b"".join(path.read_bytes() for path in (tmp_path / "checkpoint").rglob("*") if path.is_file())
    for secret in (PASSWORD, token.password):
        assert secret not in shown
        assert secret.encode() not in stored
