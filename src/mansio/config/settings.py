"""Every setting of a broker: name, default, unit, bounds, meaning, and where its value came from.

`Settings` is a frozen dataclass, so that an embedded broker costs no import beyond the standard library.
Files and the environment are read by pydantic-settings in `mansio.config.sources`, imported by
`load_settings` only.

Always true: a `Settings` that exists is valid as a whole (checked when it is made); `origin(name)` tells
where each value came from; flags win over the environment, the environment over the file, the file over the
defaults. What concerns one topic has Kafka's own name and lives in `mansio.config.topic_config`;
`topic_defaults` sets it for topics that do not say otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.config import cluster, topic_config
from mansio.errors import ConfigError, InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
INT32_MAX: Final = (1 << 31) - 1
SECOND_MS: Final = 1000
MINUTE_MS: Final = 60 * SECOND_MS
HOUR_MS: Final = 60 * MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS


class Origin(StrEnum):
    """Where a value came from; later ones win."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


class Address(NamedTuple):
    """A host and a port; port 0 asks the system for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Specification(NamedTuple):
    """What a setting is, beside its name, type and default (which the dataclass field knows)."""

    meaning: str
    unit: str = ""
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    address: str = ""  # "required" or "optional": the value is host:port
    kafka_name: str = ""  # the broker setting of Kafka that means the same
    kafka_unit: int = 1  # how many of ours make one of Kafka's, where it counts in another unit


def _setting(default: Any, meaning: str, **more: Any) -> Any:
    return field(default=default, metadata={"specification": Specification(meaning, **more)})


def _count(
    default: int, meaning: str, *, minimum: int = 1, maximum: int = INT32_MAX, kafka_name: str = ""
) -> Any:
    return _setting(default, meaning, minimum=minimum, maximum=maximum, kafka_name=kafka_name)


def _bytes(
    default: int, meaning: str, *, minimum: int = KIB, maximum: int = 1 << 40, kafka_name: str = ""
) -> Any:
    return _setting(default, meaning, unit="bytes", minimum=minimum, maximum=maximum, kafka_name=kafka_name)


def _ms(default: int, meaning: str, *, minimum: int = 0, maximum: int = 365 * DAY_MS, **kafka: Any) -> Any:
    return _setting(default, meaning, unit="ms", minimum=minimum, maximum=maximum, **kafka)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one broker. Raises `ConfigError`, one line that names the setting, when made with a
    bad value.
    """

    # Who and where
    data_dir: str = _setting(
        "mansio-data", "Directory that holds everything this broker keeps.", kafka_name="log.dirs"
    )
    node_id: int = _count(1, "Number of this broker in its cluster.", minimum=0, kafka_name="node.id")
    cluster_id: str = _setting(
        "",
        "Id of the cluster. Empty: made at the first start and kept with the data; another one is refused.",
    )
    rack: str = _setting(
        "", "Where this broker stands, told to clients. Empty: not told.", kafka_name="broker.rack"
    )
    listeners: str = _setting(
        "127.0.0.1:9092",
        "host:port of the Kafka protocol. Port 0: a free one. Only loopback unless you say otherwise.",
        address="required",
        kafka_name="listeners",
    )
    advertised_listeners: str = _setting(
        "",
        "host:port that clients are told to connect to. Empty: the one listened on.",
        address="optional",
        kafka_name="advertised.listeners",
    )
    http_listener: str = _setting(
        "127.0.0.1:8080", "host:port of health and metrics. Empty: off.", address="optional"
    )
    log_level: str = _setting(
        "info", "How much is written to standard error.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = _setting(
        "text",
        "How lines on standard error look: for people, or one JSON object each.",
        choices=("text", "json"),
    )
    metrics_partitions_max: int = _count(
        1000,
        "With more partitions than this, /metrics shows sums per topic and no single partitions.",
        minimum=0,
        maximum=100_000,
    )
    metrics_series_max: int = _count(
        1000,
        "Topics, and pairs of group and topic, that /metrics shows at most; how many were left out is shown.",
        minimum=0,
        maximum=100_000,
    )
    disk_free_warn_bytes: int = _bytes(
        GIB, "With less than this free where the data is, health and metrics warn. 0: never.", minimum=0
    )

    # Topics
    num_partitions: int = _count(
        1, "Partitions of a topic created without a number.", maximum=100_000, kafka_name="num.partitions"
    )
    auto_create_topics_enable: bool = _setting(
        False, "Create a topic when a client asks for its metadata.", kafka_name="auto.create.topics.enable"
    )
    partitions_max: int = _count(10_000, "Partitions this broker holds at most, all topics together.")
    topic_defaults: Mapping[str, str] = field(
        default_factory=dict,
        metadata={
            "specification": Specification(
                "Topic settings, by Kafka's names, for topics that do not set them."
            )
        },
    )

    # Connections and requests
    max_connections: int = _count(4096, "Open client connections at most.", kafka_name="max.connections")
    max_connections_per_ip: int = _count(
        0,
        "Open connections from one address at most. 0: as many as max_connections allows.",
        minimum=0,
        kafka_name="max.connections.per.ip",
    )
    connections_max_idle_ms: int = _ms(
        10 * MINUTE_MS,
        "A connection without a request for this long is closed. 0: never.",
        kafka_name="connections.max.idle.ms",
    )
    socket_request_max_bytes: int = _bytes(
        100 * MIB,
        "Largest request accepted.",
        minimum=64 * KIB,
        maximum=INT32_MAX,
        kafka_name="socket.request.max.bytes",
    )
    in_flight_requests_per_connection_max: int = _count(
        128,
        "Requests of one connection being worked on at a time; the connection is not read further meanwhile.",
    )
    in_flight_bytes_per_connection_max: int = _bytes(
        32 * MIB,
        "Bytes of requests and unsent answers one connection may hold before it is not read further.",
    )
    queued_max_request_bytes: int = _bytes(
        256 * MIB,
        "The same, all connections together.",
        minimum=MIB,
        kafka_name="queued.max.request.bytes",
    )
    fetch_max_bytes: int = _bytes(
        55 * MIB,
        "Bytes in one answer to a fetch at most (one batch always fits).",
        kafka_name="fetch.max.bytes",
    )
    quota_burst_ms: int = _ms(
        10 * SECOND_MS,
        "A client that was quiet may take so much of its byte rate quota at once. Kafka's quota.window.num - 1 times "
        "quota.window.size.seconds.",
        minimum=1,
    )
    fetch_wait_ms_max: int = _ms(30 * SECOND_MS, "Longest wait for data a fetch may ask for.")
    produce_wait_ms_max: int = _ms(
        MINUTE_MS, "Longest wait for durability (acks=all), whatever the client asks for.", minimum=1
    )

    # Storage
    log_flush_interval_ms: int = _ms(
        100,
        "Data written with acks=0 or 1 is synced this soon. It is delivered to consumers only then.",
        maximum=MINUTE_MS,
    )
    log_flush_offset_checkpoint_interval_ms: int = _ms(
        SECOND_MS, "How old the note on disk of what is durable may be; recovery starts there.", minimum=10
    )
    open_files_max: int = _count(4096, "Segment files held open at a time.", minimum=16)
    log_retention_check_interval_ms: int = _ms(
        5 * MINUTE_MS,
        "How often every partition is looked at for records that its retention.ms and retention.bytes let go.",
        minimum=1,
        kafka_name="log.retention.check.interval.ms",
    )
    retention_hold_disk_free_bytes_min: int = _bytes(
        512 * MIB,
        "With less than this free where the data is, nothing that pipelines hold back is kept for them any more. "
        "0: never.",
        minimum=0,
    )
    log_cleaner_backoff_ms: int = _ms(
        15 * SECOND_MS,
        "How often partitions are looked at for records that compaction should remove.",
        minimum=1,
        kafka_name="log.cleaner.backoff.ms",
    )
    log_cleaner_dedupe_buffer_size: int = _bytes(
        32 * MIB,
        "Memory for the keys of one compaction, 24 bytes each. What does not fit is compacted by the next one.",
        minimum=64 * KIB,
        maximum=4 * GIB,
        kafka_name="log.cleaner.dedupe.buffer.size",
    )
    log_cleaner_io_max_bytes_per_second: int = _bytes(
        16 * MIB,
        "Bytes that compaction reads and writes per second at most.",
        kafka_name="log.cleaner.io.max.bytes.per.second",
    )
    producer_id_expiration_ms: int = _ms(
        DAY_MS,
        "An idempotent producer that has written nothing for this long is forgotten.",
        minimum=1,
        kafka_name="producer.id.expiration.ms",
    )

    # Consumer groups
    group_min_session_timeout_ms: int = _ms(
        6 * SECOND_MS,
        "Shortest session timeout a member may ask for.",
        minimum=1,
        kafka_name="group.min.session.timeout.ms",
    )
    group_max_session_timeout_ms: int = _ms(
        30 * MINUTE_MS,
        "Longest session timeout a member may ask for.",
        minimum=1,
        kafka_name="group.max.session.timeout.ms",
    )
    group_initial_rebalance_delay_ms: int = _ms(
        500,
        "How long the first member of an empty group waits for others before partitions are assigned.",
        kafka_name="group.initial.rebalance.delay.ms",
    )
    group_max_size: int = _count(1000, "Members of one group at most.", kafka_name="group.max.size")
    group_consumer_session_timeout_ms: int = _ms(
        45 * SECOND_MS,
        "After this long without a heartbeat a member of the new group protocol is removed. A group may have its own.",
        minimum=1,
        kafka_name="group.consumer.session.timeout.ms",
    )
    group_consumer_heartbeat_interval_ms: int = _ms(
        500,
        "How often members of the new group protocol are to be heard of; so long may what one leaves behind wait for "
        "another. A group may have its own.",
        minimum=1,
        kafka_name="group.consumer.heartbeat.interval.ms",
    )
    group_consumer_assignors: str = _setting(
        "uniform,range",
        "Assignors offered to groups of the new protocol, by name, with commas between; the first one is for groups "
        "that ask for none. Others than these two are installed as entry points of mansio.assignors.",
        kafka_name="group.consumer.assignors",
    )
    group_share_session_timeout_ms: int = _ms(
        45 * SECOND_MS,
        "After this long without a heartbeat a member of a share group is removed. A group may have its own.",
        minimum=1,
        kafka_name="group.share.session.timeout.ms",
    )
    group_share_heartbeat_interval_ms: int = _ms(
        5 * SECOND_MS,
        "How often members of share groups are to be heard of. A group may have its own.",
        minimum=1,
        kafka_name="group.share.heartbeat.interval.ms",
    )
    group_share_max_size: int = _count(
        200, "Members of one share group at most.", kafka_name="group.share.max.size"
    )
    group_share_max_share_sessions: int = _count(
        2000,
        "Share sessions on this broker at most: one for each member of a share group that fetches from it.",
        kafka_name="group.share.max.share.sessions",
    )
    offsets_topic_num_partitions: int = _count(
        16,
        "Partitions of the internal topic of group offsets; fixed once it exists.",
        maximum=1000,
        kafka_name="offsets.topic.num.partitions",
    )
    share_coordinator_state_topic_num_partitions: int = _count(
        50,
        "Partitions of the internal topic of share groups' state; fixed once it exists. On a single node no more than "
        "4, because each is synced by itself.",
        maximum=1000,
        kafka_name="share.coordinator.state.topic.num.partitions",
    )
    share_coordinator_snapshot_update_records_per_snapshot: int = _count(
        500,
        "After so many changes the state of a share partition is written as a whole.",
        kafka_name="share.coordinator.snapshot.update.records.per.snapshot",
    )
    share_coordinator_state_topic_prune_interval_ms: int = _ms(
        5 * MINUTE_MS,
        "How often the log of share groups' state is let go of as far as no state needs it; states that keep it from "
        "that for as long are written anew.",
        minimum=1,
        kafka_name="share.coordinator.state.topic.prune.interval.ms",
    )
    errors_deadletterqueue_topic_name_prefix: str = _setting(
        "dlq.",
        "What the name of a topic's dead-letter topic begins with, in front of the topic's own. A group may name "
        "another topic.",
        kafka_name="errors.deadletterqueue.topic.name.prefix",
    )
    offset_metadata_max_bytes: int = _bytes(
        4 * KIB,
        "Longest note a client may attach to a committed offset.",
        minimum=0,
        kafka_name="offset.metadata.max.bytes",
    )

    offsets_retention_ms: int = _ms(
        7 * DAY_MS,
        "How long the offsets of a group without members are kept.",
        minimum=1,
        maximum=100 * 365 * DAY_MS,
        kafka_name="offsets.retention.minutes",
        kafka_unit=MINUTE_MS,
    )

    # Cluster
    etcd: str = _setting(
        "",
        "URLs of etcd, with commas: http://10.0.0.1:2379,http://10.0.0.2:2379. Given, this broker is one of a cluster "
        "and etcd decides who leads; empty, it is alone and keeps its metadata itself.",
    )
    etcd_user: str = _setting("", "User that etcd knows this broker as. Empty: etcd asks nobody.")
    etcd_password_file: str = _setting("", "File whose first line is that user's password.")
    etcd_ca_file: str = _setting("", "Certificates (PEM) that vouch for etcd, where its URLs are https.")
    etcd_cert_file: str = _setting(
        "", "This broker's own certificate (PEM) towards etcd. Of an own member: what it shows to everybody."
    )
    etcd_key_file: str = _setting("", "The key (PEM) of etcd_cert_file.")
    etcd_join: str = _setting(
        "",
        "Instead of etcd: the members of an etcd that brokers run themselves, with commas, the same list on each of "
        "them. HOST, HOST:PEER_PORT or HOST:PEER_PORT/CLIENT_PORT (2380 and 2379). This broker then starts the one "
        "that is its own and looks after it.",
    )
    etcd_member: str = _setting(
        "", "Which entry of etcd_join is this broker's. Empty: the one with the host that clients are told."
    )
    etcd_listen_host: str = _setting(
        "", "Address the own member listens on. Empty: what its host in etcd_join stands for."
    )
    etcd_initial_cluster_state: str = _setting(
        "new",
        "How a member without data begins: with all the others, or in the place of one that was removed.",
        choices=("new", "existing"),
    )
    etcd_binary: str = _setting(
        "",
        "The etcd program of an own member. Empty: the one in PATH, else the one that `make setup` unpacked.",
    )
    etcd_start_timeout_ms: int = _ms(
        MINUTE_MS,
        "How long a start waits for the own member, and with it for a majority of all.",
        minimum=SECOND_MS,
        maximum=HOUR_MS,
    )
    broker_session_timeout_ms: int = _ms(
        6 * SECOND_MS,
        "A broker that etcd has not heard of for this long is dead to the others, and its partitions get other "
        "leaders. etcd counts in whole seconds.",
        minimum=2 * SECOND_MS,
        maximum=5 * MINUTE_MS,
        kafka_name="broker.session.timeout.ms",
    )
    default_replication_factor: int = _count(
        3,
        "Copies of each partition of a topic created without a number, the broker's own topics included; refused while "
        "the cluster has never had so many brokers. A broker that is alone keeps one.",
        maximum=1000,
        kafka_name="default.replication.factor",
    )
    replica_lag_time_max_ms: int = _ms(
        30 * SECOND_MS,
        "A replica that has not caught up with its leader for this long leaves the in-sync set.",
        minimum=SECOND_MS,
        kafka_name="replica.lag.time.max.ms",
    )
    replica_fetch_wait_max_ms: int = _ms(
        500,
        "Longest wait for data in one fetch of a replica.",
        maximum=MINUTE_MS,
        kafka_name="replica.fetch.wait.max.ms",
    )
    replica_fetch_max_bytes: int = _bytes(
        MIB,
        "Bytes of one partition in one fetch of a replica (one batch always fits).",
        maximum=GIB,
        kafka_name="replica.fetch.max.bytes",
    )
    replica_fetch_response_max_bytes: int = _bytes(
        10 * MIB,
        "Bytes of all partitions in one fetch of a replica (one batch always fits).",
        maximum=GIB,
        kafka_name="replica.fetch.response.max.bytes",
    )
    replica_throttle_bytes_per_second: int = _bytes(
        0,
        "Bytes per second that replicas of this broker which are not in sync copy at most, all together. 0: as fast "
        "as the disks go.",
        minimum=0,
    )

    # Stopping
    shutdown_drain_ms: int = _ms(
        5 * SECOND_MS, "How long requests being worked on may take to finish when stopping."
    )

    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, specification in SPECIFICATIONS.items():
            _check(name, getattr(self, name), specification)
        object.__setattr__(self, "topic_defaults", _checked_topic_defaults(self.topic_defaults))
        if self.in_flight_bytes_per_connection_max > self.queued_max_request_bytes:
            raise ConfigError("in_flight_bytes_per_connection_max is larger than queued_max_request_bytes")
        if self.group_min_session_timeout_ms > self.group_max_session_timeout_ms:
            raise ConfigError("group_min_session_timeout_ms is larger than group_max_session_timeout_ms")
        if self.group_consumer_heartbeat_interval_ms >= self.group_consumer_session_timeout_ms:
            raise ConfigError(
                "group_consumer_heartbeat_interval_ms is not less than group_consumer_session_timeout_ms"
            )
        cluster.check(self)

    def origin(self, name: str) -> Origin:
        """Where the value of `name` came from. `topic_defaults.retention.ms` names one topic default."""
        known = self.origins.get(name)
        if known is not None:
            return known
        topic_setting = name.removeprefix("topic_defaults.")
        if topic_setting != name:
            return Origin.FLAG if topic_setting in self.topic_defaults else Origin.DEFAULT
        return Origin.DEFAULT if getattr(self, name) == default_of(name) else Origin.FLAG

    @property
    def listener_address(self) -> Address:
        """Where the Kafka protocol is listened on."""
        return parse_address("listeners", self.listeners)

    @property
    def advertised_address(self) -> Address | None:
        """What clients are told; None: what is listened on."""
        return (
            parse_address("advertised_listeners", self.advertised_listeners)
            if self.advertised_listeners
            else None
        )

    @property
    def http_address(self) -> Address | None:
        """Where HTTP is listened on; None: off."""
        return parse_address("http_listener", self.http_listener) if self.http_listener else None

    @property
    def clustered(self) -> bool:
        """Whether this broker is one of a cluster, with etcd deciding."""
        return bool(self.etcd or self.etcd_join)

    @property
    def etcd_urls(self) -> tuple[str, ...]:
        """The URLs of etcd, the one to try first in front; none for a broker that is alone."""
        return cluster.endpoints(self)

    @property
    def replication_factor(self) -> int:
        """Copies of each partition of a topic created without a number."""
        return self.default_replication_factor if self.clustered else 1


SPECIFICATIONS: Final[dict[str, Specification]] = {
    one.name: one.metadata["specification"] for one in fields(Settings) if "specification" in one.metadata
}


def default_of(name: str) -> Any:
    """The default of a setting (for `topic_defaults`: nothing set)."""
    return {} if name == "topic_defaults" else _DEFAULTS[name]


_DEFAULTS: Final[dict[str, Any]] = {one.name: one.default for one in fields(Settings)}


def parse_address(name: str, text: str) -> Address:
    """`host:port` or `[ipv6]:port`. Raises `ConfigError` naming the setting."""
    host, separator, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{name}: {text!r} is not host:port")
    return Address(host, int(port))


def suggestion(word: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?" for a near miss, or nothing."""
    import difflib  # only for an error: it costs a tenth of an embedded broker's start

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def load_settings(
    file: str | None = None, flags: Mapping[str, Any] | None = None, *, environment: bool = True
) -> Settings:
    """Settings from a YAML or TOML file, the environment (`MANSIO_<NAME>`) and flags (None means: not given).

    Raises `ConfigError`, one line that names the key and where it was found.
    """
    from mansio.config.sources import read_sources  # costs 0.2 s: pydantic

    return read_sources(file, flags or {}, environment=environment)


def _check(name: str, value: Any, specification: Specification) -> None:
    if name == "topic_defaults":
        return
    expected = type(default_of(name))
    if type(value) is not expected:
        raise ConfigError(f"{name}: {value!r} is not {_TYPE_NAMES[expected]}")
    if specification.choices and value not in specification.choices:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(specification.choices)}")
    if specification.address and (value or specification.address == "required"):
        parse_address(name, value)
    unit = f" {specification.unit}" if specification.unit else ""
    if specification.minimum is not None and value < specification.minimum:
        raise ConfigError(f"{name}: {value} is below the least, {specification.minimum}{unit}")
    if specification.maximum is not None and value > specification.maximum:
        raise ConfigError(f"{name}: {value} is above the most, {specification.maximum}{unit}")
    if name == "data_dir" and not value:
        raise ConfigError("data_dir: must not be empty")
    if name == "cluster_id" and not re.fullmatch(r"[A-Za-z0-9_-]{0,64}", value):  # it is part of every key
        raise ConfigError(f"cluster_id: {value!r} is not at most 64 letters, digits, '_' and '-'")


_TYPE_NAMES: Final = {int: "a whole number", bool: "true or false", str: "a text"}


def _checked_topic_defaults(values: Any) -> dict[str, str]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"topic_defaults: {values!r} is not a table of topic settings")
    checked: dict[str, str] = {}
    for name, value in values.items():
        try:
            checked[name] = topic_config.normalised(name, _as_text(value))
        except InvalidConfig as error:
            raise ConfigError(f"topic_defaults: {error}") from error
    try:
        topic_config.check_together({}, 1, checked)
    except InvalidConfig as error:
        raise ConfigError(f"topic_defaults: {error}") from error
    return checked


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
