"""Settings of a broker: name, default, unit, bounds, meaning, and the origin of each value.

Names: a setting with the meaning of a broker setting of Kafka has Kafka's name with underscores
(`log.flush.interval.ms` is `log_flush_interval_ms`); files and `--set` accept Kafka's name as well. Settings of one
topic have Kafka's own names and are defined in `mansio.config.topic_config`; `topic_defaults` sets them for topics
without a value of their own.

`Settings` is a frozen dataclass, so that an embedded broker needs no import beyond the standard library. Files and the
environment are read with pydantic-settings in `mansio.config.sources`.

Invariants: a `Settings` object is valid as a whole (checked on creation); `origin(name)` is the origin of each value;
flags override the environment, the environment overrides the file, the file overrides the defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.config import topic_config
from mansio.config.addresses import Address, is_loopback_host, parse_address
from mansio.config.cluster import (
    MemberAddress,
    is_loopback,
    parse_endpoints,
    parse_member,
    parse_members,
)
from mansio.config.listeners import DEFAULT_PROTOCOL_MAP, Listeners, SecurityProtocol, resolve_listeners
from mansio.config.security import (
    CLIENT_CERTIFICATES,
    SASL_MECHANISMS,
    ServedListener,
    check_inter_broker,
    check_listeners,
    check_mechanisms,
    check_passwords,
    check_unprotected,
    find_unprotected,
    parse_mechanisms,
    parse_principals,
    served_by_kafka,
    served_by_sqs,
    served_to_users,
)
from mansio.config.tokens import check_tokens
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
    """Where the value of a setting comes from; a later origin in this list overrides the earlier ones."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


class Specification(NamedTuple):
    """Definition of a setting. Its name, type and default are those of the dataclass field.

    `is_kafka_setting`: Kafka has a broker setting with the same name and meaning. `kafka_name`: Kafka's name, which may
    differ; "" if Kafka has no such setting. `kafka_unit`: Kafka's unit in Mansio's units, such as 60,000 for minutes.
    `no_effect`: why the setting is accepted and not used, and until when; empty if it is used. A broker that is started
    with such a setting logs a warning. `form`: the form of the value, in documents.
    """

    meaning: str
    unit: str = ""
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    is_address: bool = False  # the value is host:port, or empty
    form: str = ""
    is_kafka_setting: bool = False
    kafka_name: str = ""
    kafka_unit: int = 1
    no_effect: str = ""


def _setting(default: Any, meaning: str, **more: Any) -> Any:
    return field(default=default, metadata={"specification": Specification(meaning, **more)})


def _count(
    default: int, meaning: str, *, minimum: int = 1, maximum: int = INT32_MAX, is_kafka_setting: bool = False
) -> Any:
    return _setting(default, meaning, minimum=minimum, maximum=maximum, is_kafka_setting=is_kafka_setting)


def _bytes(
    default: int, meaning: str, *, minimum: int = KIB, maximum: int = 1 << 40, is_kafka_setting: bool = False
) -> Any:
    return _setting(
        default, meaning, unit="bytes", minimum=minimum, maximum=maximum, is_kafka_setting=is_kafka_setting
    )


def _ms(default: int, meaning: str, *, minimum: int = 0, maximum: int = 365 * DAY_MS, **more: Any) -> Any:
    return _setting(default, meaning, unit="ms", minimum=minimum, maximum=maximum, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one broker. Raises `ConfigError`, one line that names the setting, for an invalid value."""

    # Identity and listeners
    # Not `log_dirs`: it is one directory, for metadata as well as for logs.
    data_dir: str = _setting("mansio-data", "Directory of all data of this broker.", kafka_name="log.dirs")
    node_id: int = _count(1, "Number of this broker in its cluster.", minimum=0, is_kafka_setting=True)
    cluster_id: str = _setting(
        "",
        "Id of the cluster. Empty: generated at the first start and stored with the data; a different one is refused.",
    )
    broker_rack: str = _setting(
        "", "Rack of this broker, which is sent to clients. Empty: none is sent.", is_kafka_setting=True
    )
    broker_host_label: str = _setting(
        "",
        "Host of this broker. No two replicas of a partition are on brokers with the same label. Empty: the id of the "
        "broker, a host of its own; serve --processes sets the name of the machine.",
    )
    listeners: str = _setting(
        "127.0.0.1:9092",
        "Addresses on which the broker serves the Kafka protocol, separated by commas: NAME://host:port, or host:port "
        "for the listener PLAINTEXT. An empty host (NAME://:9092): all interfaces. Port 0: a free one. The default "
        "accepts local connections only.",
        form="[NAME://]host:port, ...",
        is_kafka_setting=True,
    )
    advertised_listeners: str = _setting(
        "",
        "Addresses that clients of each listener, and other brokers, connect to, in the form of listeners. Empty: the "
        "addresses of the listeners. Otherwise a listener without an entry is not advertised: its clients find no "
        "broker.",
        form="[NAME://]host:port, ...",
        is_kafka_setting=True,
    )
    listener_security_protocol_map: str = _setting(
        DEFAULT_PROTOCOL_MAP,
        "Security protocol of each listener by its name: PLAINTEXT, SSL (TLS), SASL_PLAINTEXT or SASL_SSL (TLS, and "
        "clients log in).",
        form="NAME:PROTOCOL, ...",
        is_kafka_setting=True,
    )
    inter_broker_listener_name: str = _setting(
        "",
        "Listener through which the brokers of a cluster reach each other. Empty: PLAINTEXT if it is advertised, "
        "otherwise the first advertised listener.",
        form="NAME",
        is_kafka_setting=True,
    )
    open_listeners: str = _setting(
        "",
        "Listeners, separated by commas, that do not authenticate their clients although others do: names of Kafka's "
        "listeners, http, grpc, sqs. They must be on loopback.",
        form="NAME, ...",
    )
    insecure_listen: bool = _setting(
        False,
        "Serve listeners that other machines reach and that do not authenticate their clients: everybody who reaches "
        "them can read and change everything.",
    )
    ssl_certificate_location: str = _setting(
        "",
        "PEM file with the certificate of the listeners with TLS, followed by those of the authorities between it and "
        "the root. Read again when it changes, and on SIGHUP.",
    )
    ssl_key_location: str = _setting(
        "", "PEM file with the private key of that certificate, without a passphrase."
    )
    ssl_ca_location: str = _setting(
        "",
        "PEM file with the authorities whose certificates this broker accepts: of clients, and of other brokers. "
        "Empty: those of the system, for other brokers.",
    )
    ssl_crl_location: str = _setting(
        "",
        "PEM file with certificate revocation lists: one of each authority in ssl_ca_location that issues certificates "
        "of clients or brokers. Revoked certificates are refused, those of an authority without a valid list, too.",
    )
    ssl_client_auth: str = _setting(
        "none",
        "Whether listeners with SSL ask clients for certificates, which are their identity. Listeners whose clients "
        "log in do not ask.",
        choices=CLIENT_CERTIFICATES,
        is_kafka_setting=True,
    )
    ssl_principal_mapping_rules: str = _setting(
        "DEFAULT",
        "Rules that make the name of a user from the subject of a certificate (KIP-371).",
        is_kafka_setting=True,
    )
    sasl_enabled_mechanisms: str = _setting(
        ",".join(SASL_MECHANISMS),
        "SASL mechanisms that listeners with SASL offer. PLAIN and OAUTHBEARER are offered on loopback and over "
        "TLS only.",
        is_kafka_setting=True,
    )
    sasl_oauthbearer_jwks_endpoint_url: str = _setting(
        "",
        "Keys of the issuer of tokens (JWKS): an https URL (http on loopback), or a file. OAUTHBEARER needs it, and "
        "the extra secure.",
        is_kafka_setting=True,
    )
    sasl_oauthbearer_expected_issuer: str = _setting(
        "", "Issuer (iss) that tokens must state. OAUTHBEARER needs it.", is_kafka_setting=True
    )
    sasl_oauthbearer_expected_audience: str = _setting(
        "",
        "Audiences (aud), separated by commas, of which tokens must state one. OAUTHBEARER needs it.",
        is_kafka_setting=True,
    )
    sasl_oauthbearer_sub_claim_name: str = _setting(
        "sub", "Claim of a token that has the name of the user.", is_kafka_setting=True
    )
    sasl_oauthbearer_groups_claim_name: str = _setting(
        "",
        "Claim of a token that has the groups of the user, at most 64; access control lists name them as Group:NAME. "
        "Empty: users of tokens have no groups.",
    )
    sasl_oauthbearer_clock_skew_seconds: int = _setting(
        30,
        "Time in seconds by which the clock of the issuer of tokens may differ from that of the broker.",
        unit="s",
        minimum=0,
        maximum=300,
        is_kafka_setting=True,
    )
    sasl_oauthbearer_jwks_endpoint_refresh_ms: int = _ms(
        HOUR_MS,
        "Interval in which the keys of the issuer are read again. A token with an unknown key causes it earlier.",
        minimum=SECOND_MS,
        is_kafka_setting=True,
    )
    sasl_oauthbearer_jwks_endpoint_retry_backoff_ms: int = _ms(
        100,
        "Time after a failure before the keys of the issuer are read again; it doubles with each failure.",
        minimum=10,
        is_kafka_setting=True,
    )
    sasl_oauthbearer_jwks_endpoint_retry_backoff_max_ms: int = _ms(
        10 * SECOND_MS, "Maximum of this time.", minimum=10, is_kafka_setting=True
    )
    sasl_server_max_receive_size: int = _bytes(
        64 * KIB,
        "Maximum size of a request before the client has logged in. Up to 64 KiB it takes no memory from the requests "
        "of others.",
        minimum=8 * KIB,
        maximum=64 * KIB,
        is_kafka_setting=True,
    )
    connections_max_reauth_ms: int = _ms(
        0,
        "Time after which clients with SASL have to log in again on a connection (KIP-368). 0: never.",
        is_kafka_setting=True,
    )
    connection_failed_authentication_delay_ms: int = _ms(
        100,
        "Time before the answer to a failed log-in, after which the connection is closed.",
        maximum=10 * SECOND_MS,
        is_kafka_setting=True,
    )
    authentication_timeout_ms: int = _ms(
        30 * SECOND_MS, "Time in which the client of a listener with SASL has to log in.", minimum=100
    )
    authorization_stale_max_ms: int = _ms(
        30 * SECOND_MS,
        "Time without a valid session in the cluster after which a broker ends the connections of all users, because "
        "it does not know whether they still exist.",
        minimum=SECOND_MS,
    )
    authorizer: str = _setting(
        "none",
        "acl: a client may do what access control lists allow its user, and everything else is refused. none: every "
        "client that is served may do everything.",
        choices=("none", "acl"),
    )
    super_users: str = _setting(
        "",
        "Principals that may do everything, separated by semicolons, for example User:admin. They need authorizer=acl.",
        form="User:NAME;...",
        is_kafka_setting=True,
    )
    allow_everyone_if_no_acl_found: bool = _setting(
        False,
        "Allow everybody everything on a resource that no access control list names. It needs authorizer=acl.",
        is_kafka_setting=True,
    )
    audit_log: str = _setting(
        "",
        "File to which the audit is appended, one JSON object per line. Empty: the log lines on standard error. "
        "A broker that cannot write to it does not start. It needs authorizer=acl.",
    )
    http_listener: str = _setting(
        "127.0.0.1:9080", "host:port of the HTTP API, health and metrics. Empty: off.", is_address=True
    )
    http_security_protocol: str = _setting(
        "PLAINTEXT",
        "Security protocol of the HTTP listener: SSL (TLS), SASL_PLAINTEXT (on loopback) or SASL_SSL, where requests "
        "have the user and the password as HTTP Basic. Health checks need no user.",
        choices=tuple(each.value for each in SecurityProtocol),
    )
    http_host_names: str = _setting(
        "",
        "Names, separated by commas, by which clients reach the HTTP API, besides localhost and IP addresses. A "
        "request with another name in its Host header is refused: it may come from a page in a browser.",
    )
    registry_listener: str = _setting(
        "",
        "host:port at whose root the REST API of the schema registry is, which the HTTP listener has under /registry. "
        "It has the security protocol of the HTTP listener. Empty: off.",
        is_address=True,
    )
    sqs_listener: str = _setting(
        "", "host:port of the endpoint for programs written for Amazon SQS. Empty: off.", is_address=True
    )
    sqs_security_protocol: str = _setting(
        "PLAINTEXT",
        "Security protocol of the SQS endpoint: PLAINTEXT or SSL (TLS). Its clients sign their requests, see "
        "sqs_access_keys_file.",
        choices=("PLAINTEXT", "SSL"),
    )
    grpc_listener: str = _setting("", "host:port of the gRPC API (extra grpc). Empty: off.", is_address=True)
    grpc_security_protocol: str = _setting(
        "PLAINTEXT",
        "Security protocol of the gRPC API: SSL (TLS), SASL_PLAINTEXT (on loopback) or SASL_SSL, where calls have the "
        "user and the password as HTTP Basic in their metadata.",
        choices=tuple(each.value for each in SecurityProtocol),
    )
    share_ports: bool = _setting(
        False,
        "Let other processes of the same user serve the ports of HTTP, registry, gRPC and SQS, too (SO_REUSEPORT): "
        "each connection reaches one of them. serve --processes sets it.",
    )
    supervisor_listener: str = _setting(
        "127.0.0.1:9081",
        "host:port at which serve --processes answers health checks and has the metrics of all its brokers. Empty: "
        "off.",
        is_address=True,
    )
    sqs_access_keys_file: str = _setting(
        "",
        "File with an access key id and its secret key, separated by a blank, on each line. With it requests to the "
        "SQS endpoint must be signed; each of these keys is a user of its own. Without it and without "
        "secrets_key_file every credential is accepted.",
    )
    secrets_key_file: str = _setting(
        "",
        "File (mode 0600) with a key of 64 hexadecimal digits on each line, the same on all brokers: the first one "
        "encrypts the secrets in the metadata, older ones decrypt (extra secure). With it users have access keys of "
        "SQS and delegation tokens, and requests to the SQS endpoint must be signed.",
    )
    delegation_token_max_lifetime_ms: int = _ms(
        7 * DAY_MS,
        "Time after which a delegation token ends even if it is renewed (KIP-48).",
        minimum=1,
        is_kafka_setting=True,
    )
    delegation_token_expiry_time_ms: int = _ms(
        DAY_MS,
        "Time after which a delegation token ends unless it is renewed.",
        minimum=1,
        is_kafka_setting=True,
    )
    delegation_token_expiry_check_interval_ms: int = _ms(
        HOUR_MS,
        "Interval at which expired delegation tokens are deleted, which closes connections that use them.",
        minimum=1,
        is_kafka_setting=True,
    )
    log_level: str = _setting(
        "info",
        "Lowest level of the log lines on standard error.",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = _setting(
        "text",
        "Format of the log lines on standard error: text, or one JSON object each.",
        choices=("text", "json"),
    )
    metrics_partitions_max: int = _count(
        1000,
        "With more partitions than this, /metrics has sums per topic and no series of single partitions.",
        minimum=0,
        maximum=100_000,
    )
    metrics_series_max: int = _count(
        1000,
        "Maximum number of topics, and of pairs of group and topic, in /metrics; the number of omitted ones is shown.",
        minimum=0,
        maximum=100_000,
    )
    disk_free_warn_bytes: int = _bytes(
        GIB,
        "With less free space than this in the data directory's file system, health and metrics warn. 0: never.",
        minimum=0,
    )

    # Topics
    num_partitions: int = _count(
        1, "Partitions of a topic created without a partition count.", maximum=100_000, is_kafka_setting=True
    )
    auto_create_topics_enable: bool = _setting(
        False, "Create a topic when a client asks for its metadata.", is_kafka_setting=True
    )
    partitions_max: int = _count(10_000, "Maximum number of partitions on this broker, all topics together.")
    topic_defaults: Mapping[str, str] = field(
        default_factory=dict,
        metadata={
            "specification": Specification(
                "Topic settings, with Kafka's names, for topics that do not set them."
            )
        },
    )

    # Connections and requests
    max_connections: int = _count(4096, "Maximum number of open client connections.", is_kafka_setting=True)
    max_connections_per_ip: int = _count(
        0,
        "Maximum number of open connections from one address. 0: limited by max_connections only.",
        minimum=0,
        is_kafka_setting=True,
    )
    connections_max_idle_ms: int = _ms(
        10 * MINUTE_MS,
        "A connection without a request for this long is closed. 0: never.",
        is_kafka_setting=True,
    )
    socket_request_max_bytes: int = _bytes(
        100 * MIB,
        "Maximum size of a request.",
        minimum=64 * KIB,
        maximum=INT32_MAX,
        is_kafka_setting=True,
    )
    max_decompressed_bytes: int = _bytes(
        128 * MIB,
        "Maximum size of a batch of records when decompressed, for every kind of topic; a larger one is refused with "
        "MESSAGE_TOO_LARGE. Applies to new batches.",
        maximum=128 * MIB,
    )
    check_compressed_batches: bool = _setting(
        True,
        "Decompress each compressed batch at produce and count its records; refuse it if that fails. False: store it "
        "unread, for less processor time, unless a feature of the topic reads it. Readers step over what they cannot "
        "read in any case.",
    )
    in_flight_requests_per_connection_max: int = _count(
        128,
        "Maximum number of requests of one connection in progress; with more the connection is not read.",
    )
    in_flight_bytes_per_connection_max: int = _bytes(
        32 * MIB,
        "Maximum bytes of requests and unsent responses of one connection; with more it is not read.",
    )
    queued_max_request_bytes: int = _bytes(
        256 * MIB,
        "Maximum bytes of requests and unsent responses of all connections together.",
        minimum=MIB,
        is_kafka_setting=True,
    )
    fetch_max_bytes: int = _bytes(
        55 * MIB,
        "Maximum bytes of one fetch response (at least one batch is returned).",
        is_kafka_setting=True,
    )
    quota_burst_ms: int = _ms(
        10 * SECOND_MS,
        "Time for which a client may accumulate unused quota. In Kafka: quota.window.num - 1 times "
        "quota.window.size.seconds.",
        minimum=1,
    )
    fetch_wait_ms_max: int = _ms(30 * SECOND_MS, "Maximum wait for data that a fetch may request.")
    produce_wait_ms_max: int = _ms(
        MINUTE_MS, "Maximum wait for durability (acks=all), whatever the client requests.", minimum=1
    )

    # Storage
    log_flush_interval_ms: int = _ms(
        100,
        "Data written with acks=0 or 1 is synced within this time. Consumers receive it only after the sync.",
        maximum=MINUTE_MS,
        is_kafka_setting=True,
    )
    log_flush_offset_checkpoint_interval_ms: int = _ms(
        SECOND_MS,
        "Interval of the recovery-point checkpoint of a log that is written to; recovery starts there.",
        minimum=10,
        is_kafka_setting=True,
    )
    open_files_max: int = _count(
        0,
        "Maximum number of open segment files. 0: about half of the limit of descriptors (ulimit -n), which is the "
        "maximum of other values, too.",
        minimum=0,
    )
    log_retention_check_interval_ms: int = _ms(
        5 * MINUTE_MS,
        "Interval at which every partition is checked for segments that retention.ms or retention.bytes delete.",
        minimum=1,
        is_kafka_setting=True,
    )
    retention_hold_disk_free_bytes_min: int = _bytes(
        512 * MIB,
        "With less free space than this in the data directory's file system, retention holds of pipelines are "
        "released. "
        "0: never.",
        minimum=0,
    )
    log_cleaner_backoff_ms: int = _ms(
        15 * SECOND_MS,
        "Interval at which partitions are checked for records that compaction should remove.",
        minimum=1,
        is_kafka_setting=True,
    )
    log_cleaner_dedupe_buffer_size: int = _bytes(
        32 * MIB,
        "Bytes of memory for the keys of one compaction, 24 each. What does not fit is left to the next compaction.",
        minimum=64 * KIB,
        maximum=4 * GIB,
        is_kafka_setting=True,
    )
    log_cleaner_io_max_bytes_per_second: int = _bytes(
        16 * MIB,
        "Maximum bytes per second that compaction reads and writes.",
        is_kafka_setting=True,
    )
    log_scrub_interval_ms: int = _ms(
        DAY_MS,
        "Interval at which all closed segments are read again and compared with their checksums.",
        minimum=1,
    )
    log_scrub_io_max_bytes_per_second: int = _bytes(
        16 * MIB,
        "Maximum bytes per second that the scrubber reads. 0: it does not run.",
        minimum=0,
    )
    hot_partition_window_ms: int = _ms(
        10 * SECOND_MS,
        "Length of the windows in which the rates of partitions are measured. A partition is hot if it was in 3 of 5 "
        "windows. 0: no rates are measured.",
        maximum=10 * MINUTE_MS,
    )
    hot_partition_records_per_second_min: int = _count(
        100, "Rate in records per second below which no partition is hot."
    )
    hot_partition_percent_min: int = _count(
        5,
        "Percentage of the records that this broker takes in below which no partition is hot.",
        minimum=2,
        maximum=100,
    )
    verify_again_ms: int = _ms(
        DAY_MS,
        "Stored batches that were verified this long ago are verified again on their next read.",
        minimum=1,
    )
    producer_id_expiration_ms: int = _ms(
        DAY_MS,
        "The state of an idempotent producer that has written nothing for this long is removed.",
        minimum=1,
        is_kafka_setting=True,
    )

    # Consumer groups
    group_min_session_timeout_ms: int = _ms(
        6 * SECOND_MS,
        "Minimum session timeout that a member may request.",
        minimum=1,
        is_kafka_setting=True,
    )
    group_max_session_timeout_ms: int = _ms(
        30 * MINUTE_MS,
        "Maximum session timeout that a member may request.",
        minimum=1,
        is_kafka_setting=True,
    )
    group_initial_rebalance_delay_ms: int = _ms(
        500,
        "Time that the first member of an empty group waits for others before partitions are assigned.",
        is_kafka_setting=True,
    )
    group_max_size: int = _count(1000, "Maximum number of members of one group.", is_kafka_setting=True)
    group_consumer_session_timeout_ms: int = _ms(
        45 * SECOND_MS,
        "Time without a heartbeat after which a member of the consumer group protocol is removed. Default of the group "
        "setting.",
        minimum=1,
        is_kafka_setting=True,
    )
    group_consumer_heartbeat_interval_ms: int = _ms(
        500,
        "Heartbeat interval of members of the consumer group protocol, and upper bound on how long a released "
        "partition "
        "waits for its new owner. Default of the group setting.",
        minimum=1,
        is_kafka_setting=True,
    )
    group_consumer_assignors: str = _setting(
        "uniform,range",
        "Names of the assignors of the consumer group protocol, separated by commas; the first one is used by groups "
        "that "
        "request none. Other assignors are installed as entry points of mansio.assignors.",
        is_kafka_setting=True,
    )
    group_share_session_timeout_ms: int = _ms(
        45 * SECOND_MS,
        "Time without a heartbeat after which a member of a share group is removed. Default of the group setting.",
        minimum=1,
        is_kafka_setting=True,
    )
    group_share_heartbeat_interval_ms: int = _ms(
        5 * SECOND_MS,
        "Heartbeat interval of members of share groups. Default of the group setting.",
        minimum=1,
        is_kafka_setting=True,
    )
    group_share_record_lock_duration_ms: int = _ms(
        30 * SECOND_MS,
        "Duration of the lease of a record. Default of the group setting.",
        minimum=SECOND_MS,
        maximum=MINUTE_MS,
        is_kafka_setting=True,
    )
    group_share_delivery_count_limit: int = _count(
        5,
        "Number of deliveries of a record before it is dead-lettered. Default of the group setting.",
        maximum=32_767,
        is_kafka_setting=True,
    )
    group_share_partition_max_record_locks: int = _count(
        2000,
        "Maximum number of leased records of one partition. Default of the group setting.",
        minimum=100,
        maximum=4_000,
        is_kafka_setting=True,
    )
    group_share_max_size: int = _count(
        200, "Maximum number of members of one share group.", is_kafka_setting=True
    )
    group_share_max_share_sessions: int = _count(
        2000,
        "Maximum number of share sessions on this broker: one for each member of a share group that fetches from it.",
        is_kafka_setting=True,
    )
    offsets_topic_num_partitions: int = _count(
        16,
        "Partitions of the internal topic of group offsets; fixed once it exists.",
        maximum=1000,
        is_kafka_setting=True,
    )
    transaction_state_log_num_partitions: int = _count(
        16,
        "Partitions of the internal topic of transactions; fixed once it exists.",
        maximum=1000,
        is_kafka_setting=True,
    )
    transaction_max_timeout_ms: int = _ms(
        15 * MINUTE_MS,
        "Longest timeout of a transaction that a producer may ask for.",
        minimum=1,
        is_kafka_setting=True,
    )
    transaction_prepared_max_ms: int = _ms(
        24 * 60 * MINUTE_MS,
        "Time for which a transaction that was prepared for the commit of a batch waits for the decision, before it is "
        "aborted. Readers of committed records wait at it.",
        minimum=1,
    )
    transaction_two_phase_commit_enable: bool = _setting(
        False,
        "Let producers ask for transactions that never time out (two-phase commit, KIP-939).",
        is_kafka_setting=True,
        no_effect="brokers do not offer two-phase commit since 0.2, and the setting will be refused from 0.3",
    )
    transaction_open_warning_ms: int = _ms(
        10 * MINUTE_MS,
        "Health warns of transactions that are open for longer. 0: never.",
        minimum=0,
    )
    transactional_id_expiration_ms: int = _ms(
        7 * 24 * 60 * MINUTE_MS,
        "Time after its last use at which a transactional id is forgotten.",
        minimum=1,
        is_kafka_setting=True,
    )
    share_coordinator_state_topic_num_partitions: int = _count(
        50,
        "Partitions of the internal topic of share group state; fixed once it exists. A single node uses at most 4, "
        "because each is synced by itself.",
        maximum=1000,
        is_kafka_setting=True,
    )
    share_coordinator_snapshot_update_records_per_snapshot: int = _count(
        500,
        "Number of update records after which a snapshot of a share partition's state is written.",
        is_kafka_setting=True,
    )
    share_coordinator_state_topic_prune_interval_ms: int = _ms(
        5 * MINUTE_MS,
        "Interval at which obsolete records of share group state are deleted; a state whose old snapshot "
        "prevents that for this long gets a new snapshot.",
        minimum=1,
        is_kafka_setting=True,
    )
    errors_deadletterqueue_topic_name_prefix: str = _setting(
        "dlq.",
        "Prefix of the name of a topic's dead-letter topic, before the topic's own name. A group may configure another "
        "topic.",
        is_kafka_setting=True,
    )
    offset_metadata_max_bytes: int = _bytes(
        4 * KIB,
        "Maximum size of the metadata that a client attaches to a committed offset.",
        minimum=0,
        is_kafka_setting=True,
    )

    offsets_retention_ms: int = _ms(
        7 * DAY_MS,
        "Time for which the offsets of a group without members are kept.",
        minimum=1,
        maximum=100 * 365 * DAY_MS,
        kafka_name="offsets.retention.minutes",
        kafka_unit=MINUTE_MS,
    )

    # Cluster
    etcd_endpoints: str = _setting(
        "",
        "URLs of etcd, separated by commas: http://10.0.0.1:2379,http://10.0.0.2:2379. With it this broker is a member "
        "of a cluster whose metadata and leaders are in etcd; empty: a single broker that stores its metadata itself.",
    )
    etcd_user: str = _setting("", "User name of this broker in etcd. Empty: etcd has no authentication.")
    etcd_password_file: str = _setting("", "File whose first line is that user's password.")
    etcd_ca_file: str = _setting("", "CA certificates (PEM) for etcd with https URLs.")
    etcd_cert_file: str = _setting(
        "",
        "Client certificate (PEM) of this broker for etcd; also the server certificate of its own etcd member.",
    )
    etcd_key_file: str = _setting("", "Private key (PEM) of etcd_cert_file.")
    etcd_join: str = _setting(
        "",
        "Instead of etcd_endpoints: the members of an etcd cluster that the brokers run themselves, separated by "
        "commas, "
        "the same list on each broker. HOST, HOST:PEER_PORT or HOST:PEER_PORT/CLIENT_PORT (2380 and 2379). This broker "
        "then starts and supervises its own member.",
    )
    etcd_member: str = _setting(
        "",
        "The entry of etcd_join that this broker runs. Empty: the one with the host of advertised_listeners.",
    )
    etcd_listen_host: str = _setting(
        "", "Address on which this broker's etcd member listens. Empty: its host in etcd_join."
    )
    etcd_initial_cluster_state: str = _setting(
        "new",
        "How a member without data starts: new, with all others, or existing, as the replacement of a removed one.",
        choices=("new", "existing"),
    )
    etcd_binary: str = _setting(
        "",
        "Path of the etcd program. Empty: the one in PATH, else the one that `make setup` unpacked.",
    )
    etcd_start_timeout_ms: int = _ms(
        MINUTE_MS,
        "Maximum wait at the start for the own etcd member, which needs a majority of all members.",
        minimum=SECOND_MS,
        maximum=HOUR_MS,
    )
    broker_session_timeout_ms: int = _ms(
        6 * SECOND_MS,
        "A broker whose session is not renewed for this long is considered dead, and its partitions get other leaders. "
        "etcd rounds it up to whole seconds.",
        minimum=2 * SECOND_MS,
        maximum=5 * MINUTE_MS,
        is_kafka_setting=True,
    )
    broker_hand_over_enable: bool = _setting(
        True,
        "Whether this broker ends the session of another one that was killed, before the session expires: all "
        "connections to it have ended at once, its host refuses connects, and another broker confirms both.",
    )
    default_replication_factor: int = _count(
        3,
        "Replicas of each partition of a topic created without a replication factor, including internal topics; "
        "refused "
        "while the cluster has never had that many brokers. A single broker uses 1.",
        maximum=1000,
        is_kafka_setting=True,
    )
    replica_lag_time_max_ms: int = _ms(
        30 * SECOND_MS,
        "A replica that has not caught up with its leader for this long is removed from the in-sync replicas.",
        minimum=SECOND_MS,
        is_kafka_setting=True,
    )
    replica_selector: str = _setting(
        "leader",
        "From which replica clients read: the leader, or, if a client sends its rack (client.rack), an in-sync replica "
        "in this rack. Kafka has replica.selector.class for it.",
        choices=("leader", "rack"),
    )
    replica_fetch_wait_max_ms: int = _ms(
        500,
        "Maximum wait for data in one fetch of a follower.",
        maximum=MINUTE_MS,
        is_kafka_setting=True,
    )
    replica_fetch_max_bytes: int = _bytes(
        MIB,
        "Maximum bytes of one partition in one fetch of a follower (at least one batch is returned).",
        maximum=GIB,
        is_kafka_setting=True,
    )
    replica_fetch_response_max_bytes: int = _bytes(
        10 * MIB,
        "Maximum bytes of all partitions in one fetch of a follower (at least one batch is returned).",
        maximum=GIB,
        is_kafka_setting=True,
    )
    replica_throttle_bytes_per_second: int = _bytes(
        0,
        "Maximum bytes per second that all replicas of this broker which are not in sync fetch together. 0: unlimited.",
        minimum=0,
    )

    # Stopping
    shutdown_drain_ms: int = _ms(
        5 * SECOND_MS, "Maximum time for requests in progress to finish at shutdown."
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
        listeners = self.kafka_listeners
        self._check_cluster(listeners)
        self._check_security(listeners)

    def without_effect(self) -> dict[str, str]:
        """Reasons by name: the settings that are set and not used."""
        return {
            name: specification.no_effect
            for name, specification in SPECIFICATIONS.items()
            if specification.no_effect and self.origin(name) is not Origin.DEFAULT
        }

    def origin(self, name: str) -> Origin:
        """Origin of the value of the setting `name`, or of one topic default, such as `topic_defaults.retention.ms`."""
        known = self.origins.get(name)
        if known is not None:
            return known
        topic_setting = name.removeprefix("topic_defaults.")
        if topic_setting != name:
            return Origin.FLAG if topic_setting in self.topic_defaults else Origin.DEFAULT
        return Origin.DEFAULT if getattr(self, name) == default_of(name) else Origin.FLAG

    @property
    def kafka_listeners(self) -> Listeners:
        """The listeners of the Kafka protocol."""
        return resolve_listeners(
            self.listeners,
            self.advertised_listeners,
            self.listener_security_protocol_map,
            self.inter_broker_listener_name,
        )

    @property
    def served_listeners(self) -> tuple[ServedListener, ...]:
        """The listeners of all protocols, without those that are off."""
        certificates = self.ssl_client_auth
        found = [served_by_kafka(each, certificates) for each in self.kafka_listeners.all]
        if self.http_address is not None:
            found.append(served_to_users("http", self.http_address, self.http_security, certificates))
        if self.registry_address is not None:
            found.append(
                served_to_users(
                    "registry", self.registry_address, self.http_security, certificates, protocol_of="http"
                )
            )
        if self.grpc_address is not None:
            found.append(served_to_users("grpc", self.grpc_address, self.grpc_security, certificates))
        if self.sqs_address is not None:
            found.append(served_by_sqs(self.sqs_address, has_keys=self.has_sqs_access_keys))
        return tuple(found)

    @property
    def unprotected_listeners(self) -> tuple[ServedListener, ...]:
        """The listeners that other machines reach and that do not authenticate their clients."""
        return find_unprotected(self.served_listeners)

    @property
    def sasl_mechanisms(self) -> tuple[str, ...]:
        """The mechanisms that are enabled."""
        return parse_mechanisms(self.sasl_enabled_mechanisms)

    @property
    def super_user_principals(self) -> tuple[str, ...]:
        """The principals that may do everything."""
        return parse_principals("super_users", self.super_users)

    @property
    def http_address(self) -> Address | None:
        """Address on which the broker serves HTTP; None: it does not."""
        return parse_address("http_listener", self.http_listener) if self.http_listener else None

    @property
    def registry_address(self) -> Address | None:
        """Address of the schema registry alone; None: there is none."""
        return parse_address("registry_listener", self.registry_listener) if self.registry_listener else None

    @property
    def grpc_address(self) -> Address | None:
        """Address of the gRPC API; None: there is none."""
        return parse_address("grpc_listener", self.grpc_listener) if self.grpc_listener else None

    @property
    def supervisor_address(self) -> Address | None:
        """Address of the health and metrics of several processes; None: there is none."""
        if not self.supervisor_listener:
            return None
        return parse_address("supervisor_listener", self.supervisor_listener)

    @property
    def sqs_address(self) -> Address | None:
        """Address of the SQS endpoint; None: there is none."""
        return parse_address("sqs_listener", self.sqs_listener) if self.sqs_listener else None

    @property
    def http_security(self) -> SecurityProtocol:
        """Security protocol of the HTTP listener."""
        return SecurityProtocol(self.http_security_protocol)

    @property
    def has_sqs_access_keys(self) -> bool:
        """Whether requests to the SQS endpoint must be signed with an access key."""
        return bool(self.sqs_access_keys_file or self.secrets_key_file)

    @property
    def sqs_security(self) -> SecurityProtocol:
        """Security protocol of the SQS endpoint."""
        return SecurityProtocol(self.sqs_security_protocol)

    @property
    def grpc_security(self) -> SecurityProtocol:
        """Security protocol of the gRPC API."""
        return SecurityProtocol(self.grpc_security_protocol)

    @property
    def security_protocols(self) -> tuple[SecurityProtocol, ...]:
        """Security protocols of all listeners, of those that are off, too."""
        return (
            *(each.security_protocol for each in self.kafka_listeners.all),
            self.http_security,
            self.sqs_security,
            self.grpc_security,
        )

    @property
    def http_names(self) -> frozenset[str]:
        """Names that the HTTP API accepts in the Host header, in lower case."""
        return frozenset(name.strip().lower() for name in self.http_host_names.split(",") if name.strip())

    @property
    def clustered(self) -> bool:
        """Whether this broker is a member of a cluster with etcd."""
        return bool(self.etcd_endpoints or self.etcd_join)

    @property
    def etcd_urls(self) -> tuple[str, ...]:
        """The URLs of etcd, in the order in which they are tried; empty for a single broker."""
        if self.etcd_endpoints:
            return parse_endpoints(self.etcd_endpoints)
        if not self.etcd_join:
            return ()
        own = self.own_etcd_member()
        others = [one for one in parse_members(self.etcd_join) if one != own]
        return tuple(one.client_url(self.etcd_scheme) for one in (own, *others))

    @property
    def etcd_scheme(self) -> str:
        """URL scheme of the etcd members that brokers run: https if there is a certificate, otherwise http."""
        return "https" if self.etcd_cert_file else "http"

    def own_etcd_member(self) -> MemberAddress:
        """Return the entry of `etcd_join` that this broker runs. Raises `ConfigError`."""
        members = parse_members(self.etcd_join)
        if self.etcd_member:
            wanted = parse_member("etcd_member", self.etcd_member)
            own = [one for one in members if (one.host, one.peer_port) == (wanted.host, wanted.peer_port)]
            if not own:
                raise ConfigError(f"etcd_member: {self.etcd_member} is not in etcd_join")
            return own[0]
        host = self.kafka_listeners.inter_broker.advertised_address.host.lower()
        own = [one for one in members if one.host == host]
        if len(own) == 1:
            return own[0]
        if own:
            raise ConfigError(
                f"etcd_join: {len(own)} members are on {host}; set etcd_member to the one that this broker runs"
            )
        urls = ",".join(one.client_url() for one in members)
        raise ConfigError(
            f"etcd_join: no member is on {host}, the host of advertised_listeners; set etcd_member, or "
            f"etcd_endpoints={urls} to use those members without one on this broker"
        )

    @property
    def replication_factor(self) -> int:
        """Replication factor of topics that are created without one."""
        return self.default_replication_factor if self.clustered else 1

    def _check_cluster(self, listeners: Listeners) -> None:
        """Check the settings of a cluster against each other. Raises `ConfigError`."""
        if not self.clustered:
            for name in (
                "etcd_user",
                "etcd_password_file",
                "etcd_ca_file",
                "etcd_cert_file",
                "etcd_key_file",
                "etcd_member",
            ):
                if getattr(self, name):
                    raise ConfigError(f"{name}: it requires etcd_endpoints or etcd_join")
            return
        if self.etcd_endpoints and self.etcd_join:
            raise ConfigError("etcd_join: it excludes etcd_endpoints; set one of them")
        _check_addresses_for_others(listeners)
        if bool(self.etcd_user) != bool(self.etcd_password_file):
            raise ConfigError("etcd_user: it requires etcd_password_file, and the other way round")
        if bool(self.etcd_cert_file) != bool(self.etcd_key_file):
            raise ConfigError("etcd_cert_file: it requires etcd_key_file, and the other way round")
        if self.etcd_endpoints:
            self._check_endpoints()
        else:
            self._check_own_member()

    def _check_security(self, listeners: Listeners) -> None:
        """Check the settings of TLS, authentication and authorization against each other. Raises `ConfigError`."""
        if self.authorizer == "none":
            for name in ("super_users", "allow_everyone_if_no_acl_found", "audit_log"):
                if getattr(self, name):
                    raise ConfigError(f"{name}: it needs authorizer=acl")
        _ = self.super_user_principals  # raises for an invalid one
        if any(each.is_encrypted for each in self.security_protocols):
            for name in ("ssl_certificate_location", "ssl_key_location"):
                if not getattr(self, name):
                    raise ConfigError(f"{name}: listeners with TLS need it")
            if self.ssl_crl_location and not self.ssl_ca_location:
                raise ConfigError("ssl_ca_location: ssl_crl_location needs it")
            if self.ssl_client_auth != "none" and not self.ssl_ca_location:
                raise ConfigError(f"ssl_ca_location: ssl_client_auth={self.ssl_client_auth} needs it")
        enabled = self.sasl_mechanisms
        check_tokens(self)
        for each in listeners.all:
            check_mechanisms(each, enabled)
        if self.http_address is not None:
            check_passwords("http_security_protocol", self.http_address, self.http_security)
        if self.registry_address is not None:
            check_passwords("http_security_protocol", self.registry_address, self.http_security)
        if self.grpc_address is not None:
            check_passwords("grpc_security_protocol", self.grpc_address, self.grpc_security)
        if check_listeners(self.served_listeners, self.open_listeners):
            if self.clustered:
                check_inter_broker(listeners.inter_broker)
            self._check_etcd_connection()
        elif not self.insecure_listen:
            check_unprotected(self.unprotected_listeners)

    def _check_etcd_connection(self) -> None:
        """Check that no other machine can read or change the credentials of users on their way to etcd."""
        if self.etcd_endpoints:
            urls = parse_endpoints(self.etcd_endpoints)
            if not urls[0].startswith("https:") and not all(is_loopback(url) for url in urls):
                raise ConfigError(
                    "etcd_endpoints: listeners authenticate their clients, so etcd must be on loopback or have https "
                    "URLs"
                )
        elif self.etcd_join and not self.etcd_cert_file:
            members = parse_members(self.etcd_join)
            if not all(is_loopback_host(each.host) for each in members):
                raise ConfigError(
                    "etcd_join: listeners authenticate their clients, so its members must be on loopback or have "
                    "certificates (etcd_cert_file)"
                )

    def _check_endpoints(self) -> None:
        urls = parse_endpoints(self.etcd_endpoints)
        if not urls:
            raise ConfigError("etcd_endpoints: it contains no URL")
        if self.etcd_member:
            raise ConfigError("etcd_member: it requires etcd_join")
        secure = urls[0].startswith("https:")
        for name in ("etcd_ca_file", "etcd_cert_file"):
            if getattr(self, name) and not secure:
                raise ConfigError(f"{name}: the URLs in etcd_endpoints are not https")
        if self.etcd_user and not secure and not all(is_loopback(url) for url in urls):
            raise ConfigError(
                "etcd_user: the password would be sent unencrypted; use https URLs in etcd_endpoints"
            )

    def _check_own_member(self) -> None:
        self.own_etcd_member()
        if self.etcd_user:
            raise ConfigError("etcd_user: members that brokers run have no users; use certificates")
        if bool(self.etcd_ca_file) != bool(self.etcd_cert_file):
            raise ConfigError(
                "etcd_ca_file: an own member needs etcd_cert_file, etcd_key_file and etcd_ca_file, or none of them"
            )


def _check_addresses_for_others(listeners: Listeners) -> None:
    for listener in listeners.all:
        address = listener.advertised_address
        if listener.is_advertised and address.is_wildcard:
            raise ConfigError(
                f"advertised_listeners: {address.host or 'an empty host'} is no address to connect to; set the address "
                f"of this broker that clients and other brokers can reach, for the listener {listener.name}"
            )


def _specification(name: str, defined: Specification) -> Specification:
    return defined._replace(kafka_name=name.replace("_", ".")) if defined.is_kafka_setting else defined


SPECIFICATIONS: Final[dict[str, Specification]] = {
    one.name: _specification(one.name, one.metadata["specification"])
    for one in fields(Settings)
    if "specification" in one.metadata
}

DEV_SETTINGS: Final[Mapping[str, Any]] = {
    "auto_create_topics_enable": True,
    "group_initial_rebalance_delay_ms": 0,
}
"""Values for development: of `mansio serve --dev`, of `mansio dev-cluster`, and of embedded brokers that are not in a
cluster. An explicit setting has precedence."""


def default_of(name: str) -> Any:
    """Return the default of a setting (for `topic_defaults`: empty)."""
    return {} if name == "topic_defaults" else _DEFAULTS[name]


_DEFAULTS: Final[dict[str, Any]] = {one.name: one.default for one in fields(Settings)}


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the text "; did you mean ...?" with a known word similar to `word`; "" if there is none."""
    import difflib  # only for an error: it costs a tenth of an embedded broker's start

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.65)
    return f"; did you mean {near[0]}?" if near else ""


def _check(name: str, value: Any, specification: Specification) -> None:
    if name == "topic_defaults":
        return
    expected = type(default_of(name))
    if type(value) is not expected:
        raise ConfigError(f"{name}: {value!r} is not {_TYPE_NAMES[expected]}")
    if specification.choices and value not in specification.choices:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(specification.choices)}")
    if specification.is_address and value:
        parse_address(name, value)
    unit = f" {specification.unit}" if specification.unit else ""
    if specification.minimum is not None and value < specification.minimum:
        raise ConfigError(f"{name}: {value} is below the minimum, {specification.minimum}{unit}")
    if specification.maximum is not None and value > specification.maximum:
        raise ConfigError(f"{name}: {value} is above the maximum, {specification.maximum}{unit}")
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
            checked[name] = topic_config.TOPIC_CONFIG.normalize(name, _as_text(value))
        except InvalidConfig as error:
            raise ConfigError(f"topic_defaults: {error}") from error
    if topic_config.PRIORITY_ENABLE in checked:  # it cannot be turned off
        raise ConfigError(f"topic_defaults: {topic_config.PRIORITY_ENABLE} is a setting of single topics")
    try:
        topic_config.check_combination({}, 1, checked)
    except InvalidConfig as error:
        raise ConfigError(f"topic_defaults: {error}") from error
    return checked


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
