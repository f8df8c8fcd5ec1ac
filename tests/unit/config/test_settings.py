"""Settings: precedence of the sources, origins of the values, and errors of one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mansio.config import reference
from mansio.config.addresses import parse_address
from mansio.config.settings import SPECIFICATIONS, Origin, Settings, default_of
from mansio.config.sources import load_settings
from mansio.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MANSIO_"):
            monkeypatch.delenv(name)


def written(directory: Path, text: str, name: str = "mansio.yaml") -> str:
    path = directory / name
    path.write_text(text)
    return str(path)


def test_flag_wins_over_environment_over_file_over_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "num_partitions: 2\nnode_id: 2\nfetch_wait_ms_max: 2\n")
    monkeypatch.setenv("MANSIO_NODE_ID", "3")
    monkeypatch.setenv("MANSIO_FETCH_WAIT_MS_MAX", "3")
    settings = load_settings(file, {"fetch_wait_ms_max": 4, "log_level": None})
    assert (settings.num_partitions, settings.node_id, settings.fetch_wait_ms_max) == (2, 3, 4)
    names = ("num_partitions", "node_id", "fetch_wait_ms_max", "log_level")
    assert [settings.origin(name) for name in names] == [
        Origin.FILE,
        Origin.ENVIRONMENT,
        Origin.FLAG,
        Origin.DEFAULT,
    ]


def test_topic_defaults_are_merged_setting_by_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(
        tmp_path, "topic_defaults:\n  retention.ms: 1\n  segment.ms: 1\n  cleanup.policy: [delete]\n"
    )
    monkeypatch.setenv("MANSIO_TOPIC_DEFAULTS", '{"segment.ms": 2}')
    settings = load_settings(file, {"topic_defaults": {"retention.bytes": "3"}})
    assert settings.topic_defaults == {
        "retention.ms": "1",
        "segment.ms": "2",
        "cleanup.policy": "delete",
        "retention.bytes": "3",
    }
    names = ("retention.ms", "segment.ms", "retention.bytes", "segment.bytes")
    assert [settings.origin(f"topic_defaults.{name}") for name in names] == [
        Origin.FILE,
        Origin.ENVIRONMENT,
        Origin.FLAG,
        Origin.DEFAULT,
    ]


def test_topic_defaults_of_a_command_line_are_json_and_their_origin_is_the_last_that_set_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "topic_defaults:\n  retention.ms: 1\n")
    assert load_settings(None, {}).origin("topic_defaults") is Origin.DEFAULT
    assert load_settings(file, {}).origin("topic_defaults") is Origin.FILE
    settings = load_settings(file, {"topic_defaults": '{"segment.ms": 2, "cleanup.policy": ["delete"]}'})
    assert settings.topic_defaults == {"retention.ms": "1", "segment.ms": "2", "cleanup.policy": "delete"}
    assert settings.origin("topic_defaults") is Origin.FLAG
    monkeypatch.setenv("MANSIO_TOPIC_DEFAULTS", '{"segment.ms": 2}')
    assert load_settings(file, {}).origin("topic_defaults") is Origin.ENVIRONMENT


def test_toml_file(tmp_path: Path) -> None:
    text = 'num_partitions = 2\nsocket_request_max_bytes = "1 MiB"\n[topic_defaults]\n"retention.ms" = 5\n'
    settings = load_settings(written(tmp_path, text, "mansio.toml"))
    assert (settings.num_partitions, settings.socket_request_max_bytes) == (2, 1 << 20)
    assert settings.topic_defaults == {"retention.ms": "5"}


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_empty_file_is_all_defaults(tmp_path: Path, text: str) -> None:
    assert load_settings(written(tmp_path, text)) == Settings()


@pytest.mark.parametrize(
    ("text", "value"),
    [("64 MiB", 64 << 20), ("64MiB", 64 << 20), ("1mb", 10**6), ("70000", 70_000), ("1 GiB", 1 << 30)],
)
def test_bytes_with_units(text: str, value: int) -> None:
    assert load_settings(flags={"socket_request_max_bytes": text}).socket_request_max_bytes == value


@pytest.mark.parametrize(("text", "value"), [("5 s", 5000), ("5min", 300_000), ("2 h", 7_200_000), ("9", 9)])
def test_times_with_units(text: str, value: int) -> None:
    assert load_settings(flags={"shutdown_drain_ms": text}).shutdown_drain_ms == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"num_partition": 1},
            "num_partition: no such setting; did you mean num_partitions? (from the flag)",
        ),
        ({"xyzzy": 1}, "xyzzy: no such setting (from the flag)"),
        ({"num_partitions": "many"}, "num_partitions: input should be a valid integer"),
        ({"num_partitions": 0}, "num_partitions: 0 is below the minimum, 1 (from the flag)"),
        (
            {"socket_request_max_bytes": "9 GiB"},
            "socket_request_max_bytes: 9663676416 is above the maximum, 2147483647 bytes",
        ),
        ({"socket_request_max_bytes": "9 s"}, "socket_request_max_bytes: '9 s' is not a number of bytes"),
        ({"socket_request_max_bytes": "-1"}, "socket_request_max_bytes: '-1' is not a number of bytes"),
        ({"listeners": "9092"}, "listeners: '9092' is not host:port (from the flag)"),
        ({"listeners": ""}, "listeners: '' is not host:port"),
        ({"listeners": "a:99999"}, "listeners: 'a:99999' is not host:port"),
        ({"log_level": "loud"}, "log_level: 'loud' is not one of debug, info, warning, error"),
        ({"data_dir": ""}, "data_dir: must not be empty"),
        ({"cluster_id": "a/b"}, "cluster_id: 'a/b' is not at most 64 letters"),
        ({"node_id": 1 << 31}, "node_id: 2147483648 is above the maximum"),
        ({"topic_defaults": "retention.ms=1"}, "topic_defaults: not JSON, such as"),
        ({"topic_defaults": "[1]"}, "topic_defaults: input should be a valid dictionary (from the flag)"),
        (
            {"topic_defaults": {"retention.msec": 1}},
            "topic_defaults: retention.msec: no such topic setting; did",
        ),
        (
            {"topic_defaults": {"cleanup.policy": "shred"}},
            "topic_defaults: cleanup.policy: 'shred' is not a cleanup policy",
        ),
        ({"topic_defaults": 5}, "topic_defaults: "),
        (
            {"in_flight_bytes_per_connection_max": "1 GiB"},
            "in_flight_bytes_per_connection_max is larger than queued_max_request_bytes",
        ),
        ({"group_min_session_timeout_ms": "365 d"}, "group_min_session_timeout_ms is larger than"),
    ],
)
def test_errors_are_one_line_that_names_the_key(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags=flags)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "lisners: x\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    assert str(caught.value) == f"lisners: no such setting; did you mean listeners? (from the file {file})"


@pytest.mark.parametrize("text", ["a: [", "- a\n- b\n", "just words", "\x00", "a: 1\n\ta: 2"])
@pytest.mark.parametrize("name", ["m.yaml", "m.toml"])
def test_file_that_is_no_configuration(tmp_path: Path, text: str, name: str) -> None:
    file = written(tmp_path, text, name)
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found"):
        load_settings(f"{tmp_path}/none.yaml")


def test_unknown_variable_is_refused_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANSIO_NUM_PARTITION", "3")
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert str(caught.value).startswith(
        "MANSIO_NUM_PARTITION: no such setting; did you mean MANSIO_NUM_PARTITIONS?"
    )
    assert load_settings(environment=False) == Settings()


@pytest.mark.parametrize(
    "name",
    [
        "MANSIO_BOOTSTRAP_SERVERS",
        "MANSIO_OUTPUT",
        "MANSIO_CONTEXT",
        "MANSIO_TLS",
        "MANSIO_USER",
        "MANSIO_PASSWORD",
        "MANSIO_MECHANISM",
        "MANSIO_CERTIFICATE",
        "MANSIO_KEY",
        "MANSIO_SERVICE_HOST",
        "MANSIO_SERVICE_PORT_KAFKA",
        "MANSIO_PORT",
        "MANSIO_KAFKA_PORT_9092_TCP_ADDR",
        "MANSIO_KAFKA_SERVICE_PORT",
    ],
)
def test_variables_of_clients_and_kubernetes_services_are_ignored(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Kubernetes sets such variables in every container of a namespace with a service named mansio."""
    monkeypatch.setenv(name, "tcp://10.0.0.1:9092")
    assert load_settings() == Settings()


def test_topic_defaults_in_the_environment_that_are_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANSIO_TOPIC_DEFAULTS", "retention.ms=5")
    with pytest.raises(ConfigError, match="MANSIO_TOPIC_DEFAULTS: not JSON"):
        load_settings()


@pytest.mark.parametrize("value", ["true", "1", "yes"])
def test_switches_in_the_environment(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MANSIO_AUTO_CREATE_TOPICS_ENABLE", value)
    assert load_settings().auto_create_topics_enable is True


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_partitions", "3"), ("num_partitions", True), ("auto_create_topics_enable", 1), ("data_dir", None)],
)
def test_settings_made_in_a_program_are_checked_too(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Settings(**{name: value})  # type: ignore[arg-type]  # on purpose


def test_addresses() -> None:
    assert parse_address("x", "[::1]:9092") == ("::1", 9092)
    assert str(parse_address("x", "[::1]:9092")) == "[::1]:9092"
    settings = Settings(listeners="[::1]:0", advertised_listeners="", http_listener="")
    (listener,) = settings.kafka_listeners.all
    assert listener.address == ("::1", 0)
    assert listener.advertised is None
    assert settings.http_address is None
    for wrong in ("::1:9092", "host", ":9092", "host:", "host:-1", "host:1.0", "host:\u0661"):
        with pytest.raises(ConfigError):
            parse_address("x", wrong)


def test_defaults_listen_on_loopback_only() -> None:
    settings = Settings()
    assert [each.address.host for each in settings.kafka_listeners.all] == ["127.0.0.1"]
    assert settings.http_address is not None
    assert settings.http_address.host == "127.0.0.1"


def test_origin_of_settings_made_in_a_program() -> None:
    settings = Settings(num_partitions=2, topic_defaults={"retention.ms": "1"})
    assert settings.origin("num_partitions") is Origin.FLAG
    assert settings.origin("node_id") is Origin.DEFAULT
    assert settings.origin("topic_defaults.retention.ms") is Origin.FLAG


def test_every_setting_has_a_meaning_and_every_number_a_bound() -> None:
    for name, specification in SPECIFICATIONS.items():
        assert specification.meaning.endswith("."), name
        if type(default_of(name)) is int:
            assert specification.minimum is not None, name
            assert specification.maximum is not None, name
            assert (specification.unit == "ms") == ("_ms" in name), name
            assert (specification.unit == "bytes") == (
                "_bytes" in name or name in ("log_cleaner_dedupe_buffer_size", "sasl_server_max_receive_size")
            ), name


def test_files_and_flags_accept_the_names_of_kafka(tmp_path: Path) -> None:
    file = written(tmp_path, "log.flush.interval.ms: 7\noffsets.retention.minutes: 3\nlog.dirs: d\n")
    settings = load_settings(file, {"num.partitions": "5"})
    assert (settings.log_flush_interval_ms, settings.num_partitions, settings.data_dir) == (7, 5, "d")
    assert settings.offsets_retention_ms == 3 * 60_000
    assert settings.origin("num_partitions") is Origin.FLAG
    with pytest.raises(ConfigError, match=r"num\.partitions: it is given as num_partitions, too"):
        load_settings(flags={"num_partitions": "5", "num.partitions": "5"})


def test_names_of_settings_are_those_of_kafka_with_underscores() -> None:
    named = {name: one.kafka_name for name, one in SPECIFICATIONS.items() if one.kafka_name}
    others = {name: kafka for name, kafka in named.items() if kafka != name.replace("_", ".")}
    assert others == {"data_dir": "log.dirs", "offsets_retention_ms": "offsets.retention.minutes"}


def test_reference_agrees_with_the_tables() -> None:
    """After a change of a setting run `python -m mansio.config.reference`."""
    assert (ROOT / reference.DOCUMENT_PATH).read_text() == reference.render_document()
    assert (ROOT / reference.EXAMPLE_PATH).read_text() == reference.render_example()


def test_example_file_is_all_defaults() -> None:
    settings = load_settings(str(ROOT / reference.EXAMPLE_PATH))
    assert settings == Settings()
    assert {settings.origin(name) for name in SPECIFICATIONS if name != "topic_defaults"} == {Origin.FILE}
