"""What tasks of Spark log in with: a delegation token that the driver gets, and never a password if there is one.

Readers and writers are pickled as Spark does it, and their copies run as tasks; no JVM is needed.
"""

from __future__ import annotations

import logging
import pickle
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

import mansio.blocking
from mansio.errors import (
    AuthenticationFailed,
    ConfigError,
    DelegationTokenAuthDisabled,
    SaslAuthenticationFailed,
)
from mansio.net.security_settings import SecuritySettings
from mansio.spark import task_login as module
from mansio.spark.data_source import MansioSource
from mansio.spark.options import SinkOptions
from mansio.spark.sink.iceberg_sink import IcebergStreamWriter
from mansio.spark.sink.writers import BatchWriter, StreamWriter
from mansio.spark.source.readers import BatchReader, StreamReader
from mansio.spark.sync_client import close_sync_clients, open_cluster
from mansio.spark.task_login import options_for_tasks, task_login
from support.sasl_broker import SaslBroker, sasl_broker
from support.spark_source import read_all
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mansio.blocking import Client
    from mansio.net.cluster import Cluster
    from mansio.net.delegation_tokens import DelegationToken

USER, PASSWORD = "alice", "correct horse"
TOPIC = "orders"
VALUES = [b"%d" % number for number in range(10)]
SCHEMA = StructType([StructField("value", BinaryType()), StructField("key", StringType())])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    directory = tmp_path_factory.mktemp("tasks")
    with sasl_broker(directory / "data", secrets_key_file=key_file(directory)) as started:
        for name in (USER, "bob"):
            started.set_user(name, PASSWORD)
        with connect(started) as client:
            client.admin.create_topic(TOPIC, partitions=1)
            client.publish_many(TOPIC, [mansio.OutgoingRecord(value) for value in VALUES])
        yield started


@pytest.fixture(autouse=True)
def no_clients_and_no_tokens(request: pytest.FixtureRequest) -> Iterator[None]:
    module._refused.clear()
    yield
    close_sync_clients()
    if "broker" in request.fixturenames:
        for token in tokens(request.getfixturevalue("broker")):
            with connect(request.getfixturevalue("broker")) as client:
                client.admin.tokens.expire(token.hmac)


def key_file(directory: Path) -> str:
    path = directory / "secrets.key"
    path.write_text("5a" * 32)
    path.chmod(0o600)
    return str(path)


def connect(broker: SaslBroker, user: str = USER, **more: Any) -> Client:
    return mansio.blocking.connect(broker.address, tls=False, user=user, password=PASSWORD, **more)


def tokens(broker: SaslBroker, user: str = USER) -> list[DelegationToken]:
    with connect(broker, user) as client:
        return list(client.admin.tokens.list(user))


def options(broker: SaslBroker, **more: str) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": broker.address,
        "tls": "false",
        "user": USER,
        "password": PASSWORD,
        **more,
    }


def reader(broker: SaslBroker, **more: str) -> BatchReader:
    source = MansioSource({**options(broker), "subscribe": TOPIC, **more})
    made = source.reader(StructType([StructField("value", BinaryType())]))
    assert isinstance(made, BatchReader)
    return made


def login(broker: SaslBroker, **more: str) -> Any:
    """What the tasks of a batch log in with."""
    return options_for_tasks(SinkOptions.parse({**options(broker), **more})).security


def log_ins(broker: SaslBroker) -> set[str]:
    """The ids of the tokens with which the open connections of the user have logged in; "" for the password."""

    def find() -> set[str]:
        gates = broker.broker.server.authentication._sessions.get(USER, {}).values()
        return {user.credential_id for gate in gates if (user := gate._session.user) is not None}

    found: set[str] = broker.call(find)
    return found


def test_tasks_of_a_batch_read_log_in_with_the_token_and_get_no_password(broker: SaslBroker) -> None:
    source = MansioSource({**options(broker), "subscribe": TOPIC})
    for_the_driver: MansioSource = pickle.loads(cloudpickle.dumps(source))
    assert for_the_driver.options["password"] == PASSWORD
    planned = for_the_driver.reader(StructType([StructField("value", BinaryType())]))
    assert isinstance(planned, BatchReader)
    inputs = planned.partitions()
    sent = cloudpickle.dumps((planned, for_the_driver)) + pickle.dumps(inputs)
    assert PASSWORD.encode() not in sent
    assert PASSWORD not in repr(inputs)
    (token,) = tokens(broker)
    assert token.password not in repr(inputs)
    close_sync_clients()
    assert [row["value"] for row in read_all(planned, inputs)] == VALUES
    assert log_ins(broker) == {token.token_id}


def test_each_batch_of_a_stream_has_the_token_and_the_pickled_reader_has_none(broker: SaslBroker) -> None:
    given = {**options(broker), "subscribe": TOPIC, "startingOffsets": "earliest"}
    made = MansioSource(given).streamReader(StructType([StructField("value", BinaryType())]))
    planned = getattr(made, "_reader", made)
    assert isinstance(planned, StreamReader)
    for_tasks = cloudpickle.dumps(planned)
    start = planned.initialOffset()
    end = planned.latestOffset(start, planned.getDefaultReadLimit())
    inputs = planned.partitions(start, end)
    (token,) = tokens(broker)
    assert PASSWORD.encode() not in for_tasks + pickle.dumps(inputs)
    assert token.password.encode() not in for_tasks
    close_sync_clients()
    copy: StreamReader = pickle.loads(for_tasks)
    rows = [row["value"] for one in inputs for batch in copy.read(one) for row in batch.to_pylist()]
    assert rows == VALUES
    assert log_ins(broker) == {token.token_id}


def test_a_write_and_its_commit_use_the_token(broker: SaslBroker) -> None:
    with connect(broker) as client:
        client.admin.create_topic("written", partitions=1)
    writer = BatchWriter({**options(broker), "topic": "written"}, SCHEMA, False)
    sent = cloudpickle.dumps(writer)
    again = cloudpickle.dumps(StreamWriter({**options(broker), "topic": "written"}, SCHEMA, False))
    assert PASSWORD.encode() not in sent + again
    (token,) = tokens(broker)
    close_sync_clients()
    copy: BatchWriter = pickle.loads(sent)
    rows = pa.RecordBatch.from_pydict({"value": VALUES, "key": [None] * len(VALUES)})
    copy.commit([copy.write(iter([rows]))])
    assert log_ins(broker) == {token.token_id}
    close_sync_clients()

    def readable() -> list[Any]:
        source = reader(broker, subscribe="written")
        return [row["value"] for row in read_all(source, source.partitions())]

    wait_until(lambda: readable() == VALUES, 20, "the markers of the transaction, which follow its commit")


def test_an_archive_sends_its_tasks_no_password(broker: SaslBroker) -> None:
    source = f'{{"kafka.bootstrap.servers": "{broker.address}", "subscribe": "{TOPIC}", "tls": "false"'
    source += f', "user": "{USER}", "password": "{PASSWORD}"}}'
    given = dict.fromkeys(("table", "warehouse", "dataLocation", "tableStart", "checkpointLocation"), "x")
    sent = cloudpickle.dumps(IcebergStreamWriter({**given, "tableSource": source}))
    (token,) = tokens(broker)
    assert PASSWORD.encode() not in sent
    assert token.password.encode() in sent


def test_all_batches_of_a_user_share_one_token_until_it_is_deleted(broker: SaslBroker) -> None:
    with connect(broker) as client:
        client.admin.tokens.create()  # for another program, which may delete it
        first = login(broker)
        assert first == login(broker)
        assert len(tokens(broker)) == 2
        (shared,) = [one for one in tokens(broker) if one.token_id == first.user]
        assert shared.renewers == (USER,)
        client.admin.tokens.expire(shared.hmac)
        assert login(broker).user not in (first.user, USER)


def test_a_task_whose_token_was_deleted_fails_with_the_reason(broker: SaslBroker) -> None:
    planned = reader(broker)
    inputs = planned.partitions()
    with connect(broker) as client:
        client.admin.tokens.expire(tokens(broker)[0].hmac)
    close_sync_clients()
    with pytest.raises(AuthenticationFailed, match="refused delegation token"):
        read_all(planned, inputs)


def test_the_token_of_another_user_is_not_taken(broker: SaslBroker) -> None:
    with connect(broker, "bob") as client:
        theirs = client.admin.tokens.create(renewers=[USER])
        assert theirs.token_id in {one.token_id for one in tokens(broker)}, "alice may renew it"
        assert login(broker).user != theirs.token_id
        client.admin.tokens.expire(theirs.hmac)


@pytest.mark.full
def test_a_token_is_renewed_with_the_same_secret_and_replaced_before_it_ends_for_good(
    broker: SaslBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later:
        by = timedelta()

        @classmethod
        def now(cls, zone: tzinfo) -> datetime:
            return datetime.now(zone) + cls.by

    monkeypatch.setattr(module, "datetime", Later)
    first = login(broker)
    (token,) = tokens(broker)
    with connect(broker) as client:
        client.admin.tokens.expire(token.hmac, after=timedelta(hours=11))
        assert login(broker) == first
        (renewed,) = tokens(broker)
        assert renewed.expires - datetime.now(UTC) > timedelta(hours=23)
        client.admin.tokens.expire(token.hmac)
        short = client.admin.tokens.create(renewers=[USER], max_lifetime=timedelta(hours=20))
        Later.by = timedelta(hours=9)
        assert login(broker).user == short.token_id
        Later.by = timedelta(hours=11)
        assert login(broker).user not in (short.token_id, token.token_id, USER)
        assert len(tokens(broker)) == 2


def test_tasks_get_the_password_if_the_option_or_the_cluster_allows_no_token(
    broker: SaslBroker, tmp_path: Path
) -> None:
    assert login(broker, createDelegationToken="false").password == PASSWORD
    assert tokens(broker) == []
    token = SecuritySettings(user=USER, password=PASSWORD, delegation_token=True)
    with pytest.raises(ConfigError, match="createDelegationToken needs user and password"):
        task_login(broker.address, token, creates_token=True)
    assert task_login(broker.address, token) == token
    with sasl_broker(tmp_path / "data") as without:
        without.set_user(USER, PASSWORD)
        assert login(without).password == PASSWORD
        with pytest.raises(DelegationTokenAuthDisabled):
            login(without, createDelegationToken="true")
        close_sync_clients()


@pytest.mark.full
def test_a_listener_without_scram_leaves_no_token_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"secrets_key_file": key_file(tmp_path), "sasl_enabled_mechanisms": "PLAIN"}
    with sasl_broker(tmp_path / "data", **settings) as plain, caplog.at_level(logging.WARNING):
        plain.set_user(USER, PASSWORD)
        for _ in range(2):
            assert login(plain, mechanism="PLAIN").password == PASSWORD
        with connect(plain, mechanism="PLAIN") as client:
            assert list(client.admin.tokens.list()) == []
        close_sync_clients()
    warnings = [one.getMessage() for one in caplog.records if one.name == module.logger.name]
    assert len(warnings) == 1
    assert "tasks log in with the password" in warnings[0]
    assert PASSWORD not in caplog.text


@pytest.mark.full
def test_a_new_token_is_used_when_the_brokers_accept_it_and_deleted_if_they_do_not(
    broker: SaslBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [SaslAuthenticationFailed("not known yet")] * 2

    async def refusing(bootstrap_servers: str, security: SecuritySettings) -> Cluster:
        if refusals:
            raise refusals.pop()
        return await open_cluster(bootstrap_servers, security)

    monkeypatch.setattr(module, "open_cluster", refusing)
    assert login(broker).delegation_token
    (token,) = tokens(broker)
    assert refusals == []
    with connect(broker) as client:
        client.admin.tokens.expire(token.hmac)
    refusals += [SaslAuthenticationFailed("never known")] * 1_000
    monkeypatch.setattr(module, "ACCEPT_TIMEOUT_MS", 200)
    assert login(broker).password == PASSWORD
    assert tokens(broker) == []
