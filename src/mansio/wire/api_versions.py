"""Table of the supported APIs and versions, and the reasons why others are not supported.

The ApiVersions response, the request router, the client's choice of versions, the codecs, the fuzz tests and
docs/reference/compatibility.md are derived from this table. A version is listed only when it is implemented and tested.

Invariant: the table is constant; a handler is named by a string (`module.function` under the broker's handlers), so
that this module has no imports of the project.

Source: https://kafka.apache.org/protocol.html#protocol_api_keys and Kafka's message definitions.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple


class ApiKey(IntEnum):
    """API keys of the supported APIs; keys from 20100 on are Mansio's own."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    WRITE_TXN_MARKERS = 27
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_ACLS = 29
    CREATE_ACLS = 30
    DELETE_ACLS = 31
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    ALTER_REPLICA_LOG_DIRS = 34
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    CREATE_DELEGATION_TOKEN = 38
    RENEW_DELEGATION_TOKEN = 39
    EXPIRE_DELEGATION_TOKEN = 40
    DESCRIBE_DELEGATION_TOKEN = 41
    DELETE_GROUPS = 42
    ELECT_LEADERS = 43
    INCREMENTAL_ALTER_CONFIGS = 44
    ALTER_PARTITION_REASSIGNMENTS = 45
    LIST_PARTITION_REASSIGNMENTS = 46
    OFFSET_DELETE = 47
    DESCRIBE_CLIENT_QUOTAS = 48
    ALTER_CLIENT_QUOTAS = 49
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50
    ALTER_USER_SCRAM_CREDENTIALS = 51
    DESCRIBE_QUORUM = 55
    UPDATE_FEATURES = 57
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    UNREGISTER_BROKER = 64
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    CONSUMER_GROUP_HEARTBEAT = 68
    CONSUMER_GROUP_DESCRIBE = 69
    LIST_CONFIG_RESOURCES = 74
    DESCRIBE_TOPIC_PARTITIONS = 75
    SHARE_GROUP_HEARTBEAT = 76
    SHARE_GROUP_DESCRIBE = 77
    SHARE_FETCH = 78
    SHARE_ACKNOWLEDGE = 79
    INITIALIZE_SHARE_GROUP_STATE = 83
    READ_SHARE_GROUP_STATE = 84
    WRITE_SHARE_GROUP_STATE = 85
    DELETE_SHARE_GROUP_STATE = 86
    READ_SHARE_GROUP_STATE_SUMMARY = 87
    DESCRIBE_SHARE_GROUP_OFFSETS = 90
    ALTER_SHARE_GROUP_OFFSETS = 91
    DELETE_SHARE_GROUP_OFFSETS = 92
    ACKNOWLEDGE_RECORDS = 20100
    DESCRIBE_LEASES = 20101
    REDRIVE_RECORDS = 20102
    CHALLENGE_BROKER = 20103
    AUTHENTICATE_BROKER = 20104
    LIST_DELAYED_RECORDS = 20105
    ALTER_DELAYED_RECORDS = 20106
    LIST_SCHEDULES = 20107
    ALTER_SCHEDULES = 20108
    RECEIVE_RECORDS = 20109
    RELEASE_LEASES = 20110
    REGISTER_SHARE_GROUP = 20111
    PREPARE_TRANSACTION = 20112
    COMMIT_BATCH = 20113
    DESCRIBE_HEALTH = 20114
    FORWARD_REQUEST = 20115
    SET_PASSWORD = 20116
    CREATE_SQS_ACCESS_KEY = 20117
    DESCRIBE_SQS_ACCESS_KEYS = 20118
    DELETE_SQS_ACCESS_KEY = 20119
    CHECK_AUTHORIZATION = 20120
    CREATE_API_KEY = 20121
    DESCRIBE_API_KEYS = 20122
    DELETE_API_KEY = 20123
    CONFIRM_HAND_OVER = 20124
    TRACE_RECORD = 20125
    EXPLAIN_GROUP = 20126
    COLLECT_GROUP_FACTS = 20127
    DESCRIBE_HOT_PARTITIONS = 20128
    DESCRIBE_PARTITION_RATES = 20129
    READ_TRACE = 20130
    SEARCH_RECORDS = 20131
    DESCRIBE_SCHEMAS = 20132
    ALTER_SCHEMAS = 20133
    LEASE_RANGES = 20134
    ALTER_RANGE_LEASES = 20135


UNADVERTISED_SINCE: Final = ApiKey.DESCRIBE_HEALTH
"""A broker that advertises this API supports unordered connections and forwarded requests, which are not advertised:
all are new in version 0.2."""


REQUEST_ITEMS_MAX: Final = 32_000
"""Limit on the structs, numbers and strings in the arrays of one request: three for each partition that a broker has by
default, and some more. A group name that takes one byte of a request can take a thousand bytes of the response."""

BROKER_ITEMS_MAX: Final = 100_000
"""The same limit for requests of brokers, whose transactions and share groups may have as many partitions."""


class Api(NamedTuple):
    """One supported API: its versions, its handler, and remarks for docs/reference/compatibility.md."""

    key: ApiKey
    min_version: int
    max_version: int
    handler: str | None = None
    """`module.function` under the broker's handlers; None for Produce, Fetch, ShareFetch, ShareAcknowledge and the
    authentication of brokers, which the listener calls directly."""
    note: str = ""
    """Differences of Mansio's behaviour from Kafka's."""
    newer_unsupported_reason: str = ""
    """Why Kafka's versions above `max_version` are not supported; empty if Kafka has none."""
    advertised_min_version: int | None = None
    """The lowest version in ApiVersions responses; None: `min_version`."""
    is_decoded_by_handler: bool = False
    """Whether the handler gets the request as bytes and decodes it; otherwise the request router decodes it."""
    brokers_only: bool = False
    """Whether only brokers of the cluster may send the request; others get CLUSTER_AUTHORIZATION_FAILED. A request of
    another API that contains a broker's id (`replica_id`) is refused unless that broker sent it."""
    is_advertised: bool = True
    """Whether ApiVersions responses contain the API."""

    @property
    def request_items_max(self) -> int:
        """Maximum number of array items in one request."""
        is_large = self.brokers_only or self.key in (ApiKey.WRITE_TXN_MARKERS, ApiKey.COMMIT_BATCH)
        return BROKER_ITEMS_MAX if is_large else REQUEST_ITEMS_MAX


_BROKERS_ONLY: Final = "Between brokers of a cluster only; other clients get CLUSTER_AUTHORIZATION_FAILED."
_REPLICAS: Final = (
    "A `replica_id` of 0 or more is accepted from that broker only (CLUSTER_AUTHORIZATION_FAILED)."
)
_BOUNDED: Final = "At most 1,000 items in a request; more get POLICY_VIOLATION, and nothing is changed."
_NO_AUTHORIZER: Final = (
    "Without an authorizer (`authorizer=none`) SECURITY_DISABLED, as in Kafka: every operation is allowed."
)
_GROUP_FIRST: Final = (
    "A group that does not exist, or is no share group, is reported before the rights for its topics are "
    "asked for."
)

_ROWS: Final = (
    Api(
        ApiKey.PRODUCE,
        3,
        13,
        note=(
            "Versions 0-2 are advertised, as by Kafka 4, because old librdkafka requires them for "
            "compression (KAFKA-18659); a request in them gets UNSUPPORTED_VERSION."
        ),
        advertised_min_version=0,
    ),
    Api(
        ApiKey.FETCH,
        4,
        18,
        note="Fetch sessions (KIP-227) are for followers; a response to a client has session id 0 and is complete, "
        "which KIP-227 allows. "
        "The high watermark of a follower (version 18, KIP-1166) is for replicated metadata logs, and is ignored. "
        "The preferred read replica (version 11, KIP-392) is named if the broker has `replica_selector=rack`. "
        f"{_REPLICAS}",
    ),
    Api(
        ApiKey.LIST_OFFSETS,
        1,
        10,
        "records.list_offsets",
        note=_REPLICAS,
        newer_unsupported_reason="11 adds the earliest pending upload offset of tiered storage, which does not exist.",
    ),
    Api(
        ApiKey.METADATA,
        0,
        13,
        "cluster.metadata",
        note="A request with more than 1,000 topics creates none of them.",
    ),
    Api(
        ApiKey.OFFSET_COMMIT,
        2,
        9,
        "offsets.offset_commit",
        newer_unsupported_reason="10 names topics by id (KIP-848 clients use 9, too).",
    ),
    Api(
        ApiKey.OFFSET_FETCH,
        1,
        9,
        "offsets.offset_fetch",
        newer_unsupported_reason="10 names topics by id (KIP-848 clients use 9, too).",
    ),
    Api(
        ApiKey.FIND_COORDINATOR,
        0,
        6,
        "groups.find_coordinator",
        note="Groups, transactional ids, share partitions and, with key type 100, the schema registry. Creates the "
        "internal topic, as in Kafka.",
    ),
    Api(ApiKey.JOIN_GROUP, 0, 9, "groups.join_group"),
    Api(ApiKey.HEARTBEAT, 0, 4, "groups.heartbeat"),
    Api(ApiKey.LEAVE_GROUP, 0, 5, "groups.leave_group"),
    Api(ApiKey.SYNC_GROUP, 0, 5, "groups.sync_group"),
    Api(ApiKey.DESCRIBE_GROUPS, 0, 6, "groups.describe_groups"),
    Api(ApiKey.LIST_GROUPS, 0, 5, "groups.list_groups"),
    Api(
        ApiKey.SASL_HANDSHAKE,
        0,
        1,
        "sasl.sasl_handshake",
        note="Version 0, after which tokens have no headers, is answered with UNSUPPORTED_VERSION; librdkafka requires "
        "that it is offered.",
    ),
    Api(
        ApiKey.API_VERSIONS,
        0,
        4,
        "cluster.api_versions",
        note="A request in an unknown version is answered in version 0 with UNSUPPORTED_VERSION (KIP-511).",
    ),
    Api(ApiKey.CREATE_TOPICS, 2, 7, "topics.create_topics", note=_BOUNDED),
    Api(ApiKey.DELETE_TOPICS, 1, 6, "topics.delete_topics", note=_BOUNDED),
    Api(
        ApiKey.DELETE_RECORDS,
        0,
        2,
        "records.delete_records",
        note="Responds when every in-sync replica has stored the new start offset: deletions are permanent.",
    ),
    Api(
        ApiKey.INIT_PRODUCER_ID,
        0,
        5,
        "transactions.init_producer_id",
        newer_unsupported_reason="6 is two-phase commit (KIP-939), which Apache Kafka does not process yet "
        "(4.2 refuses it) and no released client asks for.",
    ),
    Api(ApiKey.OFFSET_FOR_LEADER_EPOCH, 2, 4, "records.offset_for_leader_epoch", note=_REPLICAS),
    Api(
        ApiKey.ADD_PARTITIONS_TO_TXN,
        0,
        5,
        "transactions.add_partitions_to_txn",
        note="Versions 4 and 5 take several transactions, from brokers of the cluster only "
        "(CLUSTER_AUTHORIZATION_FAILED).",
    ),
    Api(ApiKey.ADD_OFFSETS_TO_TXN, 0, 4, "transactions.add_offsets_to_txn"),
    Api(
        ApiKey.END_TXN,
        0,
        5,
        "transactions.end_txn",
        note="From version 5 on each end bumps the epoch (KIP-890).",
    ),
    Api(
        ApiKey.WRITE_TXN_MARKERS,
        1,
        2,
        "transaction_markers.write_txn_markers",
        note="Clients with ALTER or CLUSTER_ACTION for the cluster only abort a transaction that is open in the "
        "partition, with its epochs (KIP-664); other "
        "requests are for brokers of the cluster (CLUSTER_AUTHORIZATION_FAILED).",
    ),
    Api(ApiKey.TXN_OFFSET_COMMIT, 0, 5, "offsets.txn_offset_commit"),
    Api(ApiKey.DESCRIBE_ACLS, 1, 3, "acls.describe_acls", note=_NO_AUTHORIZER),
    Api(ApiKey.CREATE_ACLS, 1, 3, "acls.create_acls", note=_NO_AUTHORIZER),
    Api(ApiKey.DELETE_ACLS, 1, 3, "acls.delete_acls", note=_NO_AUTHORIZER),
    Api(ApiKey.DESCRIBE_CONFIGS, 1, 4, "configs.describe_configs"),
    Api(
        ApiKey.ALTER_CONFIGS,
        0,
        2,
        "configs.alter_configs",
        note="Topics, groups and brokers, as IncrementalAlterConfigs. Settings not named are reset to their defaults, "
        f"as in Kafka. {_BOUNDED}",
    ),
    Api(
        ApiKey.ALTER_REPLICA_LOG_DIRS,
        1,
        2,
        "log_dirs.alter_replica_log_dirs",
        note="A broker has one log directory, where every replica already is; another one gets LOG_DIR_NOT_FOUND.",
    ),
    Api(ApiKey.DESCRIBE_LOG_DIRS, 1, 5, "log_dirs.describe_log_dirs", note="A broker has one log directory."),
    Api(
        ApiKey.SASL_AUTHENTICATE,
        0,
        2,
        "sasl.sasl_authenticate",
        note="SCRAM-SHA-256, SCRAM-SHA-512; PLAIN on an encrypted connection or from the broker's machine; "
        "re-authentication (KIP-368). An unknown user fails at the end "
        "of the exchange, as with a wrong password.",
    ),
    Api(ApiKey.CREATE_PARTITIONS, 0, 3, "topics.create_partitions", note=_BOUNDED),
    Api(
        ApiKey.CREATE_DELEGATION_TOKEN,
        1,
        3,
        "delegation_tokens.create_delegation_token",
        note="KIP-48. Without `secrets_key_file` DELEGATION_TOKEN_AUTH_DISABLED. All four APIs are refused "
        "(DELEGATION_TOKEN_REQUEST_NOT_ALLOWED) unless the connection is encrypted, or from the broker's machine, and, "
        "unlike in Kafka, to clients that have authenticated with OAUTHBEARER or an API key. At most 100 tokens of an "
        "owner and 10,000 in all (POLICY_VIOLATION).",
    ),
    Api(ApiKey.RENEW_DELEGATION_TOKEN, 1, 2, "delegation_tokens.renew_delegation_token"),
    Api(ApiKey.EXPIRE_DELEGATION_TOKEN, 1, 2, "delegation_tokens.expire_delegation_token"),
    Api(ApiKey.DESCRIBE_DELEGATION_TOKEN, 1, 3, "delegation_tokens.describe_delegation_token"),
    Api(ApiKey.DELETE_GROUPS, 0, 2, "groups.delete_groups", note=_BOUNDED),
    Api(
        ApiKey.ELECT_LEADERS,
        0,
        2,
        "replicas.elect_leaders",
        note="On a single node the only replica is the leader: ELECTION_NOT_NEEDED.",
    ),
    Api(
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        0,
        1,
        "configs.incremental_alter_configs",
        note="Topics, groups, brokers, and with the empty name all brokers; of brokers the settings that are dynamic "
        f"in [Configuration](configuration.md). No log levels of single loggers. {_BOUNDED}",
    ),
    Api(
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
        0,
        1,
        "replicas.alter_partition_reassignments",
        note="A single node accepts only the replicas that a partition has. The leader epoch increases when a replica "
        "is removed.",
    ),
    Api(
        ApiKey.LIST_PARTITION_REASSIGNMENTS,
        0,
        0,
        "replicas.list_partition_reassignments",
    ),
    Api(
        ApiKey.OFFSET_DELETE,
        0,
        0,
        "offsets.offset_delete",
        note="A missing right for a topic is reported also for a group that does not exist.",
    ),
    Api(ApiKey.DESCRIBE_CLIENT_QUOTAS, 0, 1, "quotas.describe_client_quotas"),
    Api(
        ApiKey.ALTER_CLIENT_QUOTAS,
        0,
        1,
        "quotas.alter_client_quotas",
        note=(
            "`producer_byte_rate`, `consumer_byte_rate` and `controller_mutation_rate` of client ids and of users, "
            "`connection_creation_rate` of addresses; other keys are refused. "
            "A client that has not authenticated is the user ANONYMOUS. "
            f"{_BOUNDED}"
        ),
    ),
    Api(
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
        0,
        0,
        "users.describe_user_scram_credentials",
        note="KIP-554.",
    ),
    Api(
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        0,
        0,
        "users.alter_user_scram_credentials",
        note="KIP-554. It contains the equivalent of a password, so it is refused (POLICY_VIOLATION) unless the "
        "connection is encrypted or from the broker's machine. Unlike in Kafka, clients that have authenticated with a "
        "token or a key set no credentials, and may only delete them (CLUSTER_AUTHORIZATION_FAILED). A new name has 1 "
        "to 255 bytes, is printable and in the form NFKC of Unicode, without spaces at its ends; ANONYMOUS and * are "
        "reserved. A salted password has the "
        f"length of the mechanism's hash. {_BOUNDED}",
    ),
    Api(
        ApiKey.DESCRIBE_QUORUM,
        0,
        2,
        "cluster.describe_quorum",
        note="The members of etcd have no broker ids: the active controller stands for them as leader and only voter, "
        "with its term as epoch (the lower 31 bits of the revision of its election). Offsets are revisions of the "
        "metadata that the broker has; it is an observer unless it is the controller.",
    ),
    Api(
        ApiKey.UPDATE_FEATURES,
        0,
        2,
        "cluster.update_features",
        note="The level of mansio.version can be raised, never lowered; other updates get INVALID_UPDATE_VERSION.",
    ),
    Api(ApiKey.DESCRIBE_CLUSTER, 0, 2, "cluster.describe_cluster"),
    Api(ApiKey.DESCRIBE_PRODUCERS, 0, 0, "producers.describe_producers"),
    Api(
        ApiKey.UNREGISTER_BROKER,
        0,
        0,
        "replicas.unregister_broker",
        note="Refused (INVALID_REQUEST) while the broker runs, or has replicas.",
    ),
    Api(ApiKey.DESCRIBE_TRANSACTIONS, 0, 0, "transactions.describe_transactions"),
    Api(
        ApiKey.LIST_TRANSACTIONS,
        0,
        2,
        "transactions.list_transactions",
        note="The pattern of version 2 is a regular expression of RE2 and matches whole ids.",
    ),
    Api(
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        0,
        1,
        "consumer_groups.consumer_group_heartbeat",
        note="KIP-848. Regular expressions (version 1) are RE2 and match whole names, those of internal topics too.",
    ),
    Api(ApiKey.CONSUMER_GROUP_DESCRIBE, 0, 1, "consumer_groups.consumer_group_describe"),
    Api(
        ApiKey.LIST_CONFIG_RESOURCES,
        0,
        1,
        "configs.list_config_resources",
        note="Topics, this broker, and groups with own settings. Version 0 lists client metrics: always empty.",
    ),
    Api(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, 0, "cluster.describe_topic_partitions"),
    Api(ApiKey.SHARE_GROUP_HEARTBEAT, 1, 1, "share.share_groups.share_group_heartbeat", note="KIP-932."),
    Api(ApiKey.SHARE_GROUP_DESCRIBE, 1, 1, "share.share_groups.share_group_describe"),
    Api(
        ApiKey.SHARE_FETCH,
        1,
        2,
        note="KIP-932, with the acquire modes of KIP-1206: `batch_optimized` returns whole batches, `record_limit`"
        " splits them.",
    ),
    Api(ApiKey.SHARE_ACKNOWLEDGE, 1, 2, note="KIP-932, with the renewals of KIP-1222."),
    Api(
        ApiKey.INITIALIZE_SHARE_GROUP_STATE,
        0,
        0,
        "share.share_state.initialize_share_group_state",
        note=_BROKERS_ONLY,
        is_decoded_by_handler=True,
        brokers_only=True,
    ),
    Api(
        ApiKey.READ_SHARE_GROUP_STATE,
        0,
        0,
        "share.share_state.read_share_group_state",
        note=_BROKERS_ONLY,
        is_decoded_by_handler=True,
        brokers_only=True,
    ),
    Api(
        ApiKey.WRITE_SHARE_GROUP_STATE,
        1,
        1,
        "share.share_state.write_share_group_state",
        note=_BROKERS_ONLY,
        is_decoded_by_handler=True,
        brokers_only=True,
    ),
    Api(
        ApiKey.DELETE_SHARE_GROUP_STATE,
        0,
        0,
        "share.share_state.delete_share_group_state",
        note=_BROKERS_ONLY,
        is_decoded_by_handler=True,
        brokers_only=True,
    ),
    Api(
        ApiKey.READ_SHARE_GROUP_STATE_SUMMARY,
        1,
        1,
        "share.share_state.read_share_group_state_summary",
        note=_BROKERS_ONLY,
        is_decoded_by_handler=True,
        brokers_only=True,
    ),
    Api(
        ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
        0,
        1,
        "share.share_offsets.describe_share_group_offsets",
        note=_GROUP_FIRST,
    ),
    Api(
        ApiKey.ALTER_SHARE_GROUP_OFFSETS,
        0,
        0,
        "share.share_offsets.alter_share_group_offsets",
        note="A group that does not exist is created (KAFKA-19662).",
    ),
    Api(
        ApiKey.DELETE_SHARE_GROUP_OFFSETS,
        0,
        0,
        "share.share_offsets.delete_share_group_offsets",
        note=_GROUP_FIRST,
    ),
    Api(
        ApiKey.ACKNOWLEDGE_RECORDS,
        0,
        0,
        "share.leases.acknowledge_records",
        note="Mansio's own. ShareAcknowledge without a session, with a delay for releases and a reason for rejections.",
        is_decoded_by_handler=True,
    ),
    Api(
        ApiKey.DESCRIBE_LEASES,
        0,
        0,
        "share.leases.describe_leases",
        note="Mansio's own. Leases of share partitions: member, offsets, age.",
    ),
    Api(
        ApiKey.REDRIVE_RECORDS,
        0,
        0,
        "share.leases.redrive_records",
        note="Mansio's own. Makes dead-lettered records available to their group again; idempotent per redrive id.",
    ),
    Api(
        ApiKey.CHALLENGE_BROKER,
        0,
        0,
        note=f"Mansio's own, not advertised. First step of the authentication of a broker. {_BROKERS_ONLY}",
        brokers_only=True,
        is_advertised=False,
    ),
    Api(
        ApiKey.AUTHENTICATE_BROKER,
        0,
        1,
        note="Mansio's own, not advertised. Second step of the authentication of a broker. After version 1 the "
        f"responses on the connection may overtake. {_BROKERS_ONLY}",
        brokers_only=True,
        is_advertised=False,
    ),
    Api(
        ApiKey.LIST_DELAYED_RECORDS,
        0,
        0,
        "delays.list_delayed_records",
        note="Mansio's own. Pending records of partitions, by due time, id or key.",
    ),
    Api(
        ApiKey.ALTER_DELAYED_RECORDS,
        0,
        0,
        "delays.alter_delayed_records",
        note="Mansio's own. Cancels pending records, or changes when they are due.",
    ),
    Api(
        ApiKey.LIST_SCHEDULES,
        0,
        0,
        "schedules.list_schedules",
        note="Mansio's own. Recurring schedules of partitions, with their next due times.",
    ),
    Api(
        ApiKey.ALTER_SCHEDULES,
        0,
        0,
        "schedules.alter_schedules",
        note="Mansio's own. Creates, pauses, resumes or deletes a recurring schedule; idempotent.",
    ),
    Api(
        ApiKey.RECEIVE_RECORDS,
        0,
        0,
        "share.forwarded_leases.receive_records",
        note=f"Mansio's own, not advertised. Leases records for a member without a session. {_BROKERS_ONLY}",
        brokers_only=True,
        is_advertised=False,
    ),
    Api(
        ApiKey.RELEASE_LEASES,
        0,
        0,
        "share.forwarded_leases.release_leases",
        note=f"Mansio's own, not advertised. Releases all leases of such a member. {_BROKERS_ONLY}",
        brokers_only=True,
        is_advertised=False,
    ),
    Api(
        ApiKey.REGISTER_SHARE_GROUP,
        0,
        0,
        "share.forwarded_leases.register_share_group",
        note=f"Mansio's own, not advertised. Creates the group of such a member. {_BROKERS_ONLY}",
        brokers_only=True,
        is_advertised=False,
    ),
    Api(
        ApiKey.PREPARE_TRANSACTION,
        0,
        0,
        "batch_commits.prepare_transaction",
        note="Mansio's own. Lets a transaction wait for the decision about its batch, past its timeout; idempotent.",
    ),
    Api(
        ApiKey.COMMIT_BATCH,
        0,
        0,
        "batch_commits.commit_batch",
        note="Mansio's own. Commits or aborts the transactions of all tasks of a batch, all or none; idempotent.",
    ),
    Api(
        ApiKey.DESCRIBE_HEALTH,
        0,
        0,
        "cluster.describe_health",
        note="Mansio's own. Problems and warnings of the broker that answers, and whether its session is held.",
    ),
    Api(
        ApiKey.FORWARD_REQUEST,
        0,
        0,
        note="Mansio's own, not advertised. A request for a client of HTTP, gRPC or SQS, with the identity of the "
        f"client, for the broker that is responsible (compare KIP-590). {_BROKERS_ONLY}",
        brokers_only=True,
        is_advertised=False,
    ),
    Api(
        ApiKey.SET_PASSWORD,
        0,
        0,
        "users.set_password",
        note="Mansio's own. Changes the password of a user; the previous one stays valid for a given time. Refused "
        "(POLICY_VIOLATION) unless the connection is encrypted or from the broker's machine.",
    ),
    Api(
        ApiKey.CREATE_SQS_ACCESS_KEY,
        0,
        0,
        "sqs_access_keys.create_sqs_access_key",
        note="Mansio's own. Creates an access key of a user for SQS; the secret is returned once. Refused "
        "(POLICY_VIOLATION) unless the connection is encrypted or from the broker's machine, and (SECURITY_DISABLED) "
        "by a broker without `secrets_key_file`.",
    ),
    Api(
        ApiKey.DESCRIBE_SQS_ACCESS_KEYS,
        0,
        0,
        "sqs_access_keys.describe_sqs_access_keys",
        note="Mansio's own. The access keys of one user or of all, without their secrets.",
    ),
    Api(
        ApiKey.DELETE_SQS_ACCESS_KEY,
        0,
        0,
        "sqs_access_keys.delete_sqs_access_key",
        note="Mansio's own.",
    ),
    Api(
        ApiKey.CHECK_AUTHORIZATION,
        0,
        0,
        "acls.check_authorization",
        note="Mansio's own. Whether a user may do operations on resources, and which ACL decides it. About itself each "
        f"client may ask, about others with DESCRIBE on the cluster. {_BOUNDED}",
    ),
    Api(
        ApiKey.CREATE_API_KEY,
        0,
        0,
        "api_keys.create_api_key",
        note="Mansio's own. Creates an API key of a user, and returns it. Refused (POLICY_VIOLATION) unless the "
        "connection is encrypted or from the broker's machine.",
    ),
    Api(
        ApiKey.DESCRIBE_API_KEYS,
        0,
        0,
        "api_keys.describe_api_keys",
        note="Mansio's own. API keys of one user or of all, without the keys themselves.",
    ),
    Api(
        ApiKey.DELETE_API_KEY,
        0,
        0,
        "api_keys.delete_api_key",
        note="Mansio's own. Deletes an API key; its sessions end.",
    ),
    Api(
        ApiKey.CONFIRM_HAND_OVER,
        0,
        0,
        "cluster.confirm_hand_over",
        note="Mansio's own, not advertised. Whether the broker that answers, too, has no connection to a broker that "
        f"seems to have been killed, and is refused when it connects. {_BROKERS_ONLY}",
        brokers_only=True,
        is_advertised=False,
    ),
    Api(
        ApiKey.TRACE_RECORD,
        0,
        0,
        "traces.trace_record",
        note="Mansio's own. What has happened to a record, attempt by attempt, and whether that is all.",
    ),
    Api(
        ApiKey.EXPLAIN_GROUP,
        0,
        0,
        "group_explanations.explain_group",
        note="Mansio's own. What keeps a group of any type from going on, with the command that helps; its coordinator "
        "answers. Topics without DESCRIBE are counted and not named.",
    ),
    Api(
        ApiKey.COLLECT_GROUP_FACTS,
        0,
        0,
        "group_explanations.collect_group_facts",
        note="Mansio's own, not advertised. What a broker knows of the partitions and clients of a group. "
        f"{_BROKERS_ONLY}",
        brokers_only=True,
        is_advertised=False,
    ),
    Api(
        ApiKey.DESCRIBE_HOT_PARTITIONS,
        0,
        0,
        "hot_partitions.describe_hot_partitions",
        note="Mansio's own. Load and hot partitions of the broker that answers; their most frequent keys need READ on "
        "the topic.",
    ),
    Api(
        ApiKey.DESCRIBE_PARTITION_RATES,
        0,
        0,
        "hot_partitions.describe_partition_rates",
        note="Mansio's own, not advertised. Rates of the partitions that the broker which answers leads. "
        f"{_BROKERS_ONLY}",
        brokers_only=True,
        is_advertised=False,
    ),
    Api(
        ApiKey.READ_TRACE,
        0,
        0,
        "traces.read_trace",
        note=f"Mansio's own, not advertised. The rows about a record that a broker has. {_BROKERS_ONLY}",
        brokers_only=True,
        is_advertised=False,
    ),
    Api(
        ApiKey.SEARCH_RECORDS,
        0,
        0,
        "record_search.search_records",
        note="Mansio's own. One step of a search for the records of a partition that have a key or an id "
        "(`mansio-id`); its leader answers.",
    ),
    Api(
        ApiKey.DESCRIBE_SCHEMAS,
        0,
        0,
        "schemas.describe_schemas",
        note="Mansio's own. Reads subjects, versions and settings of the schema registry, and checks compatibility; "
        "the leader of `_schemas` answers, found by FindCoordinator with key type 100.",
    ),
    Api(
        ApiKey.ALTER_SCHEMAS,
        0,
        0,
        "schemas.alter_schemas",
        note="Mansio's own. Registers and deletes schemas, and changes the settings of subjects; as DescribeSchemas.",
    ),
    Api(
        ApiKey.LEASE_RANGES,
        0,
        0,
        "share.range_leases.lease_ranges",
        note="Mansio's own. Leases ranges of offsets to a member that reads the records by Fetch.",
    ),
    Api(
        ApiKey.ALTER_RANGE_LEASES,
        0,
        0,
        "share.range_leases.alter_range_leases",
        note="Mansio's own. Renews, claims or accepts such leases, and releases those that it does not name.",
    ),
)

SUPPORTED_APIS: Final[dict[ApiKey, Api]] = {row.key: row for row in _ROWS}
"""All supported APIs by key, in ascending order of the keys."""

_RAFT: Final = "brokers use a metadata store, not a KRaft quorum"
_STREAMS: Final = "streams groups (KIP-1071) are not planned"

UNSUPPORTED_APIS: Final[dict[str, str]] = {
    "UnregisterBroker (64), AddRaftVoter (80) and on": _RAFT,
    "GetTelemetrySubscriptions (71), PushTelemetry (72)": "client metrics are not collected (KIP-714 is optional)",
    "StreamsGroupHeartbeat (88), StreamsGroupDescribe (89)": _STREAMS,
}
"""Names of Kafka's APIs that Mansio does not support -> reason."""

_FLEXIBLE_VERSION_MIN: Final[dict[int, int]] = {
    ApiKey.PRODUCE: 9,
    ApiKey.FETCH: 12,
    ApiKey.LIST_OFFSETS: 6,
    ApiKey.METADATA: 9,
    ApiKey.OFFSET_COMMIT: 8,
    ApiKey.OFFSET_FETCH: 6,
    ApiKey.FIND_COORDINATOR: 3,
    ApiKey.JOIN_GROUP: 6,
    ApiKey.HEARTBEAT: 4,
    ApiKey.LEAVE_GROUP: 4,
    ApiKey.SYNC_GROUP: 4,
    ApiKey.DESCRIBE_GROUPS: 5,
    ApiKey.LIST_GROUPS: 3,
    ApiKey.API_VERSIONS: 3,
    ApiKey.CREATE_TOPICS: 5,
    ApiKey.DELETE_TOPICS: 4,
    ApiKey.DELETE_RECORDS: 2,
    ApiKey.INIT_PRODUCER_ID: 2,
    ApiKey.OFFSET_FOR_LEADER_EPOCH: 4,
    ApiKey.ADD_PARTITIONS_TO_TXN: 3,
    ApiKey.ADD_OFFSETS_TO_TXN: 3,
    ApiKey.END_TXN: 3,
    ApiKey.WRITE_TXN_MARKERS: 1,
    ApiKey.TXN_OFFSET_COMMIT: 3,
    ApiKey.DESCRIBE_ACLS: 2,
    ApiKey.CREATE_ACLS: 2,
    ApiKey.DELETE_ACLS: 2,
    ApiKey.DESCRIBE_CONFIGS: 4,
    ApiKey.ALTER_CONFIGS: 2,
    ApiKey.ALTER_REPLICA_LOG_DIRS: 2,
    ApiKey.DESCRIBE_LOG_DIRS: 2,
    ApiKey.SASL_AUTHENTICATE: 2,
    ApiKey.CREATE_PARTITIONS: 2,
    ApiKey.CREATE_DELEGATION_TOKEN: 2,
    ApiKey.RENEW_DELEGATION_TOKEN: 2,
    ApiKey.EXPIRE_DELEGATION_TOKEN: 2,
    ApiKey.DESCRIBE_DELEGATION_TOKEN: 2,
    ApiKey.DELETE_GROUPS: 2,
    ApiKey.ELECT_LEADERS: 2,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: 1,
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: 0,
    ApiKey.LIST_PARTITION_REASSIGNMENTS: 0,
    ApiKey.DESCRIBE_CLIENT_QUOTAS: 1,
    ApiKey.ALTER_CLIENT_QUOTAS: 1,
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: 0,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: 0,
    ApiKey.DESCRIBE_QUORUM: 0,
    ApiKey.UPDATE_FEATURES: 0,
    ApiKey.DESCRIBE_CLUSTER: 0,
    ApiKey.DESCRIBE_PRODUCERS: 0,
    ApiKey.UNREGISTER_BROKER: 0,
    ApiKey.DESCRIBE_TRANSACTIONS: 0,
    ApiKey.LIST_TRANSACTIONS: 0,
    ApiKey.CONSUMER_GROUP_HEARTBEAT: 0,
    ApiKey.CONSUMER_GROUP_DESCRIBE: 0,
    ApiKey.LIST_CONFIG_RESOURCES: 0,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: 0,
    ApiKey.SHARE_GROUP_HEARTBEAT: 0,
    ApiKey.SHARE_GROUP_DESCRIBE: 0,
    ApiKey.SHARE_FETCH: 0,
    ApiKey.SHARE_ACKNOWLEDGE: 0,
    ApiKey.INITIALIZE_SHARE_GROUP_STATE: 0,
    ApiKey.READ_SHARE_GROUP_STATE: 0,
    ApiKey.WRITE_SHARE_GROUP_STATE: 0,
    ApiKey.DELETE_SHARE_GROUP_STATE: 0,
    ApiKey.READ_SHARE_GROUP_STATE_SUMMARY: 0,
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS: 0,
    ApiKey.ALTER_SHARE_GROUP_OFFSETS: 0,
    ApiKey.DELETE_SHARE_GROUP_OFFSETS: 0,
    ApiKey.ACKNOWLEDGE_RECORDS: 0,
    ApiKey.DESCRIBE_LEASES: 0,
    ApiKey.REDRIVE_RECORDS: 0,
    ApiKey.CHALLENGE_BROKER: 0,
    ApiKey.AUTHENTICATE_BROKER: 0,
    ApiKey.LIST_DELAYED_RECORDS: 0,
    ApiKey.ALTER_DELAYED_RECORDS: 0,
    ApiKey.LIST_SCHEDULES: 0,
    ApiKey.ALTER_SCHEDULES: 0,
    ApiKey.RECEIVE_RECORDS: 0,
    ApiKey.RELEASE_LEASES: 0,
    ApiKey.REGISTER_SHARE_GROUP: 0,
    ApiKey.PREPARE_TRANSACTION: 0,
    ApiKey.COMMIT_BATCH: 0,
    ApiKey.DESCRIBE_HEALTH: 0,
    ApiKey.FORWARD_REQUEST: 0,
    ApiKey.SET_PASSWORD: 0,
    ApiKey.CHECK_AUTHORIZATION: 0,
    ApiKey.CREATE_SQS_ACCESS_KEY: 0,
    ApiKey.DESCRIBE_SQS_ACCESS_KEYS: 0,
    ApiKey.DELETE_SQS_ACCESS_KEY: 0,
    ApiKey.CREATE_API_KEY: 0,
    ApiKey.DESCRIBE_API_KEYS: 0,
    ApiKey.DELETE_API_KEY: 0,
    ApiKey.CONFIRM_HAND_OVER: 0,
    ApiKey.TRACE_RECORD: 0,
    ApiKey.READ_TRACE: 0,
    ApiKey.EXPLAIN_GROUP: 0,
    ApiKey.COLLECT_GROUP_FACTS: 0,
    ApiKey.DESCRIBE_HOT_PARTITIONS: 0,
    ApiKey.DESCRIBE_PARTITION_RATES: 0,
    ApiKey.SEARCH_RECORDS: 0,
    ApiKey.DESCRIBE_SCHEMAS: 0,
    ApiKey.ALTER_SCHEMAS: 0,
    ApiKey.LEASE_RANGES: 0,
    ApiKey.ALTER_RANGE_LEASES: 0,
}
_NEVER_FLEXIBLE: Final = 1 << 15


def is_flexible(api_key: int, version: int) -> bool:
    """Whether this version of the API is flexible: has compact lengths and tagged fields (KIP-482). False for unknown
    APIs."""
    return version >= _FLEXIBLE_VERSION_MIN.get(api_key, _NEVER_FLEXIBLE)


def is_supported(api_key: int, version: int) -> bool:
    """Whether this version of the API is supported; False for an unknown `api_key`."""
    api = SUPPORTED_APIS.get(api_key)  # type: ignore[call-overload]  # an IntEnum equals its number
    return api is not None and api.min_version <= version <= api.max_version


def advertised_versions() -> list[tuple[int, int, int]]:
    """Return (API key, lowest version, highest version) of each API in ApiVersions responses."""
    return [
        (
            int(row.key),
            row.min_version if row.advertised_min_version is None else row.advertised_min_version,
            row.max_version,
        )
        for row in _ROWS
        if row.is_advertised
    ]
