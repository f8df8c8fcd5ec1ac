"""Options of the Spark source and sink: names of Spark's Kafka connector are accepted, and an invalid option is
reported in one line."""

from __future__ import annotations

import pickle

import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from mansio.errors import ConfigError, RequestError
from mansio.spark.arrow.schema import record_schema
from mansio.spark.data_source import checked_columns
from mansio.spark.options import SinkOptions, SourceOptions, selected_columns
from mansio.wire.field_values import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, READ_COMMITTED, READ_UNCOMMITTED
from mansio.wire.topic_partition import TopicPartition

BASE = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "flights"}


def parse(*, streaming: bool = False, **options: str) -> SourceOptions:
    return SourceOptions.parse({**BASE, **options}, streaming=streaming)


def test_options_of_sparks_kafka_source_mean_the_same_here() -> None:
    """In any letter case, as Spark hands them over in lower case."""
    parsed = SourceOptions.parse(
        {
            "kafka.bootstrap.servers": "a:1,b:2",
            "subscribe": "z, a",
            "STARTINGOFFSETS": '{"a": {"0": 7, "1": -2}, "z": {"0": -1}}',
            "failondataloss": "False",
            "minPartitions": "10",
            "maxOffsetsPerTrigger": "1000",
            "minOffsetsPerTrigger": "10",
            "maxTriggerDelay": "2m",
            "includeHeaders": "true",
            "kafka.isolation.level": "read_uncommitted",
            "kafka.fetch.max.bytes": "1",
            "kafkaConsumer.pollTimeoutMs": "500",
            "kafka.security.protocol": "PLAINTEXT",
        },
        streaming=True,
    )
    assert parsed.bootstrap_servers == "a:1,b:2"
    assert parsed.subscription.topics == ("a", "z")
    assert parsed.starting_offsets.offsets == {
        TopicPartition("a", 0): 7,
        TopicPartition("a", 1): EARLIEST_TIMESTAMP,
        TopicPartition("z", 0): LATEST_TIMESTAMP,
    }
    assert not parsed.fail_on_data_loss
    assert (parsed.partitions_min, parsed.offsets_per_trigger_max, parsed.offsets_per_trigger_min) == (
        10,
        1000,
        10,
    )
    assert parsed.trigger_delay_ms_max == 120_000
    assert parsed.columns[-1] == "headers"
    assert parsed.isolation_level == READ_UNCOMMITTED
    assert pickle.loads(pickle.dumps(parsed)) == parsed


def test_defaults_are_those_of_sparks_kafka_source() -> None:
    batch, stream = parse(), parse(streaming=True)
    assert (
        batch.starting_offsets.offsets,
        batch.ending_offsets.offsets,
        stream.starting_offsets.offsets,
    ) == (
        EARLIEST_TIMESTAMP,
        LATEST_TIMESTAMP,
        LATEST_TIMESTAMP,
    )
    assert batch.fail_on_data_loss
    assert batch.isolation_level == READ_COMMITTED
    assert batch.columns == ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")


def test_sizes_and_times_have_units() -> None:
    parsed = parse(fetchBytes="8MB", batchBytes="65536", maxTriggerDelay="90s")
    assert (parsed.fetch_bytes, parsed.batch_bytes, parsed.trigger_delay_ms_max) == (8 << 20, 65536, 90_000)
    assert parse(maxTriggerDelay="1500").trigger_delay_ms_max == 1500


def test_dead_letters_add_a_column() -> None:
    assert selected_columns({"columns": "value,offset", "onUnreadable": "dead-letter"}) == (
        "value",
        "offset",
        "error",
    )
    assert selected_columns({"columns": "value, offset", "includeHeaders": "true"}) == (
        "value",
        "offset",
        "headers",
    )


WRONG = [
    ({"subscribe": "a", "subscribePattern": "b"}, "subscribe and subscribePattern"),
    ({"subscribe": None}, "there is none"),
    ({"kafka.bootstrap.servers": None}, "option kafka.bootstrap.servers is missing"),
    ({"kafka.bootstrap.servers": "here:there"}, "not an address"),
    ({"subscribe": "a,,b"}, "option subscribe"),
    ({"subscribe": None, "subscribePattern": "("}, "not a regular expression"),
    ({"subscribe": None, "subscribePattern": "[["}, "not a regular expression"),
    ({"subscribe": None, "assign": '{"t": [0, "1"]}'}, "option assign"),
    ({"startingOffset": "earliest"}, "did you mean startingOffsets?"),
    ({"startingOffsets": "newest"}, "give earliest, latest, or JSON"),
    ({"startingOffsets": "latest"}, "a batch read that begins there has no records"),
    ({"startingOffsets": '{"t": {"0": -1}}'}, "a batch read that begins there has no records"),
    ({"startingOffsets": '{"t": {"0": -3}}'}, "option startingOffsets"),
    ({"startingOffsets": '{"t": {"0": 1.5}}'}, "option startingOffsets"),
    ({"startingOffsets": "[" * 100_000}, "option startingOffsets"),
    ({"endingOffsets": "earliest"}, "a batch read that ends there has no records"),
    ({"startingTimestamp": "yesterday"}, "option startingTimestamp"),
    ({"startingOffsetsByTimestamp": '{"t": {"0": -5}}'}, "milliseconds since the epoch"),
    ({"startingOffsetsByTimestampStrategy": "guess"}, "give error or latest"),
    ({"failOnDataLoss": "yes"}, "give true or false"),
    ({"minPartitions": "0"}, "whole number of at least 1"),
    ({"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"}, "above maxOffsetsPerTrigger"),
    ({"maxTriggerDelay": "soon"}, "give a time"),
    ({"fetchBytes": "4TB"}, "give a size"),
    ({"fetchBytes": "1"}, "give a size"),
    ({"onUnreadable": "ignore"}, "suspend or skip or dead-letter"),
    ({"topicIds": '{"t": 5}'}, "option topicIds"),
    ({"columns": "value,colour"}, "no column 'colour'"),
    ({"kafka.group.id": "g"}, "offsets live in its checkpoint"),
    ({"kafka.auto.offset.reset": "latest"}, "use startingOffsets"),
    ({"kafka.security.protocol": "TLS"}, "needs option kafka.security.protocol: PLAINTEXT, SSL"),
    ({"kafka.ssl.truststore.location": "x"}, "needs option kafka.security.protocol"),
    ({"kafka.ssl.provider": "x"}, "option kafka.ssl.provider is not supported"),
    ({"kafka.ssl.keystore.key": "x"}, "Spark would show the key"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_option_is_refused_in_one_line(change: dict[str, str | None], message: str) -> None:
    given = {name: text for name, text in {**BASE, **change}.items() if text is not None}
    with pytest.raises((ConfigError, RequestError)) as refused:
        SourceOptions.parse(given)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_stream_has_no_end() -> None:
    with pytest.raises(ConfigError, match="endingOffsets is for batch reads"):
        parse(streaming=True, endingOffsets="latest")


def test_a_schema_of_the_users_own_chooses_columns_and_changes_no_types() -> None:
    every = (*parse(includeHeaders="true").columns, "lane")
    assert checked_columns(parse(), from_arrow_schema(record_schema(every))) == every
    assert checked_columns(parse(), StructType().add("offset", "long").add("value", "binary")) == (
        "offset",
        "value",
    )
    for wrong, message in (
        (
            StructType().add("value", "string"),
            "column value is binary, not string: correct the schema, and cast",
        ),
        (StructType().add("colour", "string"), "a topic has no column colour"),
        (StructType().add("error", "string"), "a topic has no column error"),
    ):
        with pytest.raises(ConfigError, match=message):
            checked_columns(parse(), wrong)
    assert checked_columns(parse(onUnreadable="dead-letter"), StructType().add("error", "string")) == (
        "error",
    )


def test_options_of_a_writer() -> None:
    parsed = SinkOptions.parse({"kafka.bootstrap.servers": "a:1", "topic": "out", "kafka.acks": "1"})
    assert parsed == SinkOptions("a:1", "out", acks=1, exactly_once=False)
    with pytest.raises(
        ConfigError, match=r"no option 'subscribe': there are kafka\.bootstrap\.servers, topic, acks"
    ):
        SinkOptions.parse(BASE)
    with pytest.raises(ConfigError, match="did you mean topic"):
        SinkOptions.parse({"kafka.bootstrap.servers": "a:1", "topics": "out"})


SINK = {"kafka.bootstrap.servers": "a:1", "topic": "out"}


def test_a_writer_is_exactly_once_unless_it_is_configured_otherwise() -> None:
    assert SinkOptions.parse(SINK).exactly_once
    assert SinkOptions.parse({**SINK, "acks": "-1"}).exactly_once
    assert not SinkOptions.parse({**SINK, "exactlyOnce": "false"}).exactly_once
    parsed = SinkOptions.parse({**SINK, "queryId": "q-1", "batchId": "7", "transactionTimeout": "2m"})
    assert (parsed.query_id, parsed.batch_id, parsed.transaction_timeout_ms) == ("q-1", 7, 120_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acks": "1", "exactlyOnce": "true"}, "exactlyOnce needs acks=all"),
        ({"queryId": "q"}, "needs option batchId"),
        ({"queryId": "a:b", "batchId": "1"}, "letters, digits"),
        ({"queryId": "q", "batchId": "-1"}, "whole number of at least 0"),
    ],
)
def test_options_that_contradict_exactly_once_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SinkOptions.parse({**SINK, **options})


DECODED = {**BASE, "valueFormat": "json", "valueSchema": '{"type": "object", "properties": {"a": {}}}'}


def test_decoded_columns_follow_the_others_or_stand_where_columns_names_them() -> None:
    assert selected_columns(DECODED)[-1] == "decoded_value"
    assert selected_columns({**DECODED, "columns": "decoded_value,offset"}) == ("decoded_value", "offset")
    assert selected_columns({**DECODED, "columns": "decoded_value"}) == ("decoded_value",)
    both = {**DECODED, "keyFormat": "json", "keySchema": "{}", "onUnreadable": "dead-letter"}
    assert selected_columns(both)[-3:] == ("decoded_key", "decoded_value", "error")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"valueFormat": "xml"}, "option valueFormat is 'xml'"),
        ({"valueFormat": "json"}, "needs a schema"),
        ({"valueSchema": "{}"}, "option valueSchema needs option valueFormat"),
        ({"schemaRegistry": "http://h:1"}, "option schemaRegistry needs option valueFormat or keyFormat"),
        ({"columns": "decoded_value"}, "column decoded_value needs option valueFormat"),
        ({"warehouse": "lake"}, "option warehouse needs option asTable=true"),
        ({"asTable": "true", "startingOffsets": "earliest"}, "startingOffsets cannot be used with asTable"),
        (
            {"asTable": "true", "onUnreadable": "dead-letter"},
            "onUnreadable cannot be dead-letter with asTable",
        ),
        ({"asTable": "true", "catalog": "http://h:1"}, "option catalog needs option warehouse"),
    ],
)
def test_options_of_decoding_and_tables_that_do_not_fit_are_refused(
    options: dict[str, str], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        SourceOptions.parse({**BASE, **options})


def test_subject_is_that_of_the_only_topic() -> None:
    registry = {"valueFormat": "json", "schemaRegistry": "http://h:1"}
    (column,) = SourceOptions.parse({**BASE, **registry}).decoded
    assert column.format.subject == "flights-value"
    with pytest.raises(ConfigError, match="option valueSubject is missing"):
        SourceOptions.parse({**BASE, **registry, "subscribe": "t,u"})
    with pytest.raises(ConfigError, match="a stream reads the log"):
        SourceOptions.parse({**BASE, "asTable": "true"}, streaming=True)


def test_credentials_of_the_environment_are_in_the_options_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MANSIO_SCHEMA_REGISTRY_USER", "reader")
    monkeypatch.setenv("MANSIO_SCHEMA_REGISTRY_PASSWORD", "s3cret")
    options = {**BASE, "valueFormat": "json", "schemaRegistry": "http://h:1"}
    parsed = SourceOptions.parse(options)
    assert parsed.decoded[0].format.credentials is not None
    assert parsed.decoded[0].format.credentials.password == "s3cret"
    assert "s3cret" not in repr(parsed)
    with pytest.raises(ConfigError, match="must not contain credentials"):
        SourceOptions.parse({**options, "schemaRegistry": "http://u:p@h:1"})


def test_options_of_records_are_refused_for_deliveries() -> None:
    chosen = {"kafka.bootstrap.servers": "127.0.0.1:1", "deliveries": "true", "subscribe": "a"}
    assert SourceOptions.parse(chosen).is_deliveries
    for more in ({"columns": "key"}, {"asTable": "true"}, {"subscribe": "a,b"}, {"includeHeaders": "true"}):
        with pytest.raises(ConfigError, match="deliveries"):
            SourceOptions.parse({**chosen, **more})
    with pytest.raises(ConfigError, match="batch reads"):
        SourceOptions.parse(chosen, streaming=True)
