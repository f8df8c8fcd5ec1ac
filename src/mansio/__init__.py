"""Mansio: a durable, distributed message queue that speaks Kafka's protocol, with individual acknowledgements.

>>> async with mansio.connect("127.0.0.1:9092") as client:      # asyncio
...     await client.publish("orders", b"one", key=b"ada")
>>> with mansio.blocking.connect("127.0.0.1:9092") as client:   # the same API, blocking
...     client.publish("orders", b"two", key=b"ada")
>>> with mansio.Broker("data") as broker:                       # a complete broker in this process
...     print(broker.address)

The public modules are `mansio`, `mansio.blocking`, `mansio.errors`, `mansio.serde`, `mansio.spark` and
`mansio.testing`. Everything else is private and may change in any release. Names are imported on first use, so that
`import mansio` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mansio.version import __version__

if TYPE_CHECKING:
    from mansio import blocking, errors
    from mansio.client.admin.acls import AclAdmin, AclDecision
    from mansio.client.admin.admin import (
        Admin,
        ClusterDescription,
        ConfigEntry,
        PartitionLag,
        TopicDescription,
    )
    from mansio.client.admin.cluster import (
        BrokerFeatures,
        BrokerHealth,
        BrokerStatus,
        ClusterAdmin,
        ClusterFeatures,
        ClusterStatus,
        ElectionResult,
        ElectionType,
        HealthProblem,
        LogDir,
        PartitionStatus,
        Reassignment,
        ReassignmentResult,
    )
    from mansio.client.admin.delays import (
        ChangedRecords,
        DelayAdmin,
        PendingCounts,
        PendingPage,
        PendingRecord,
        RecordId,
    )
    from mansio.client.admin.explanations import GroupExplanation, GroupFinding
    from mansio.client.admin.groups import GroupDescription, GroupListing, GroupListings, GroupMember
    from mansio.client.admin.hot_partitions import HotKey, HotPartition, HotPartitions
    from mansio.client.admin.quotas import DEFAULT_ENTITY, DefaultEntity, Quota, QuotaAdmin
    from mansio.client.admin.record_search import FoundRecord, SearchProgress, SkippedRange
    from mansio.client.admin.schedules import CatchUp, Schedule, ScheduleAdmin
    from mansio.client.admin.schemas import (
        CompatibilityResult,
        RegisteredVersion,
        SchemaAdmin,
        SchemaById,
    )
    from mansio.client.admin.shares import (
        LeasedRange,
        LeaseHolder,
        ShareAdmin,
        ShareGroupDescription,
        ShareLeases,
        ShareMember,
        ShareOffset,
    )
    from mansio.client.admin.tokens import TokenAdmin
    from mansio.client.admin.traces import RecordTrace, TraceAdmin, TraceEvent
    from mansio.client.admin.transactions import (
        HangingTransaction,
        PartitionProducer,
        TransactionAdmin,
        TransactionDescription,
        TransactionListing,
        TransactionListings,
    )
    from mansio.client.admin.users import NewApiKey, SqsAccessKey, User, UserAdmin, UserApiKey
    from mansio.client.client import Client, connect
    from mansio.client.consumer.consumer import Consumer, RebalanceCallback, UnreadableCallback
    from mansio.client.producer.accumulator import Delivery
    from mansio.client.producer.producer import Producer, ProducerOptions
    from mansio.client.share.handler_runner import Handler, HandlerMode
    from mansio.client.share.leased import Leased
    from mansio.client.share.receiver import Receiver
    from mansio.client.transactions.processor import ProcessHandler
    from mansio.client.transactions.transaction import Transaction
    from mansio.client.types import (
        Headers,
        HeadersLike,
        Message,
        OutgoingRecord,
        Publishable,
        RecordMetadata,
        StartAt,
        TopicPartition,
    )
    from mansio.errors import DelayNotOffered, LeaseLost, MansioError
    from mansio.net.delegation_tokens import DelegationToken
    from mansio.net.metadata import Node, PartitionMetadata
    from mansio.net.offsets import CommittedOffset, ListedOffset
    from mansio.net.redrive import RedriveResult
    from mansio.net.token_credentials import TokenProvider
    from mansio.node.embedded import EmbeddedBroker as Broker
    from mansio.ports import Backoff
    from mansio.state.authorization.acls import (
        Acl,
        AclFilter,
        Operation,
        PatternType,
        Permission,
        ResourceType,
    )
    from mansio.state.hot_partitions.remedies import BrokerLoad, LeaderMove, Remedy, RemedyKind
    from mansio.state.registry.schema import SchemaReference

__all__ = [
    "DEFAULT_ENTITY",
    "Acl",
    "AclAdmin",
    "AclDecision",
    "AclFilter",
    "Admin",
    "Backoff",
    "Broker",
    "BrokerFeatures",
    "BrokerHealth",
    "BrokerLoad",
    "BrokerStatus",
    "CatchUp",
    "ChangedRecords",
    "Client",
    "ClusterAdmin",
    "ClusterDescription",
    "ClusterFeatures",
    "ClusterStatus",
    "CommittedOffset",
    "CompatibilityResult",
    "ConfigEntry",
    "Consumer",
    "DefaultEntity",
    "DelayAdmin",
    "DelayNotOffered",
    "DelegationToken",
    "Delivery",
    "ElectionResult",
    "ElectionType",
    "FoundRecord",
    "GroupDescription",
    "GroupExplanation",
    "GroupFinding",
    "GroupListing",
    "GroupListings",
    "GroupMember",
    "Handler",
    "HandlerMode",
    "HangingTransaction",
    "Headers",
    "HeadersLike",
    "HealthProblem",
    "HotKey",
    "HotPartition",
    "HotPartitions",
    "LeaderMove",
    "LeaseHolder",
    "LeaseLost",
    "Leased",
    "LeasedRange",
    "ListedOffset",
    "LogDir",
    "MansioError",
    "Message",
    "NewApiKey",
    "Node",
    "Operation",
    "OutgoingRecord",
    "PartitionLag",
    "PartitionMetadata",
    "PartitionProducer",
    "PartitionStatus",
    "PatternType",
    "PendingCounts",
    "PendingPage",
    "PendingRecord",
    "Permission",
    "ProcessHandler",
    "Producer",
    "ProducerOptions",
    "Publishable",
    "Quota",
    "QuotaAdmin",
    "Reassignment",
    "ReassignmentResult",
    "RebalanceCallback",
    "Receiver",
    "RecordId",
    "RecordMetadata",
    "RecordTrace",
    "RedriveResult",
    "RegisteredVersion",
    "Remedy",
    "RemedyKind",
    "ResourceType",
    "Schedule",
    "ScheduleAdmin",
    "SchemaAdmin",
    "SchemaById",
    "SchemaReference",
    "SearchProgress",
    "ShareAdmin",
    "ShareGroupDescription",
    "ShareLeases",
    "ShareMember",
    "ShareOffset",
    "SkippedRange",
    "SqsAccessKey",
    "StartAt",
    "TokenAdmin",
    "TokenProvider",
    "TopicDescription",
    "TopicPartition",
    "TraceAdmin",
    "TraceEvent",
    "Transaction",
    "TransactionAdmin",
    "TransactionDescription",
    "TransactionListing",
    "TransactionListings",
    "UnreadableCallback",
    "User",
    "UserAdmin",
    "UserApiKey",
    "__version__",
    "blocking",
    "connect",
    "errors",
]

_ACLS = "mansio.client.admin.acls"
_ACL_TYPES = "mansio.state.authorization.acls"
_ADMIN = "mansio.client.admin.admin"
_CLUSTER = "mansio.client.admin.cluster"
_HOT_PARTITIONS = "mansio.client.admin.hot_partitions"
_REMEDIES = "mansio.state.hot_partitions.remedies"
_DELAYS = "mansio.client.admin.delays"
_SCHEMAS = "mansio.client.admin.schemas"
_TRACES = "mansio.client.admin.traces"
_RECORD_SEARCH = "mansio.client.admin.record_search"
_EXPLANATIONS = "mansio.client.admin.explanations"
_GROUPS = "mansio.client.admin.groups"
_QUOTAS = "mansio.client.admin.quotas"
_SCHEDULES = "mansio.client.admin.schedules"
_SHARES = "mansio.client.admin.shares"
_TRANSACTIONS = "mansio.client.admin.transactions"
_TYPES = "mansio.client.types"
_USERS = "mansio.client.admin.users"
_LAZY = {
    "DEFAULT_ENTITY": _QUOTAS,
    "Acl": _ACL_TYPES,
    "AclAdmin": _ACLS,
    "AclDecision": _ACLS,
    "AclFilter": _ACL_TYPES,
    "Operation": _ACL_TYPES,
    "PatternType": _ACL_TYPES,
    "Permission": _ACL_TYPES,
    "ResourceType": _ACL_TYPES,
    "Admin": _ADMIN,
    "Backoff": "mansio.ports",
    "Broker": "mansio.node.embedded:EmbeddedBroker",
    "BrokerFeatures": _CLUSTER,
    "BrokerHealth": _CLUSTER,
    "BrokerLoad": _REMEDIES,
    "BrokerStatus": _CLUSTER,
    "Client": "mansio.client.client",
    "ChangedRecords": _DELAYS,
    "ClusterAdmin": _CLUSTER,
    "ClusterDescription": _ADMIN,
    "ClusterFeatures": _CLUSTER,
    "ClusterStatus": _CLUSTER,
    "CommittedOffset": "mansio.net.offsets",
    "ConfigEntry": _ADMIN,
    "Consumer": "mansio.client.consumer.consumer",
    "DelayAdmin": _DELAYS,
    "DelayNotOffered": "mansio.errors",
    "Delivery": "mansio.client.producer.accumulator",
    "ElectionType": _CLUSTER,
    "ElectionResult": _CLUSTER,
    "GroupDescription": _GROUPS,
    "GroupExplanation": _EXPLANATIONS,
    "GroupFinding": _EXPLANATIONS,
    "GroupListing": _GROUPS,
    "GroupListings": _GROUPS,
    "GroupMember": _GROUPS,
    "Handler": "mansio.client.share.handler_runner",
    "HandlerMode": "mansio.client.share.handler_runner",
    "Headers": _TYPES,
    "HeadersLike": _TYPES,
    "HealthProblem": _CLUSTER,
    "HotKey": _HOT_PARTITIONS,
    "HotPartition": _HOT_PARTITIONS,
    "HotPartitions": _HOT_PARTITIONS,
    "LeaderMove": _REMEDIES,
    "LeaseHolder": _SHARES,
    "LeaseLost": "mansio.errors",
    "Leased": "mansio.client.share.leased",
    "LeasedRange": _SHARES,
    "ListedOffset": "mansio.net.offsets",
    "LogDir": _CLUSTER,
    "MansioError": "mansio.errors",
    "Message": _TYPES,
    "Node": "mansio.net.metadata",
    "OutgoingRecord": _TYPES,
    "PartitionLag": _ADMIN,
    "PartitionStatus": _CLUSTER,
    "PartitionMetadata": "mansio.net.metadata",
    "PendingCounts": _DELAYS,
    "PendingPage": _DELAYS,
    "PendingRecord": _DELAYS,
    "ProcessHandler": "mansio.client.transactions.processor",
    "Producer": "mansio.client.producer.producer",
    "ProducerOptions": "mansio.client.producer.producer",
    "Publishable": _TYPES,
    "Quota": _QUOTAS,
    "QuotaAdmin": _QUOTAS,
    "DefaultEntity": _QUOTAS,
    "RebalanceCallback": "mansio.client.consumer.consumer",
    "Reassignment": _CLUSTER,
    "ReassignmentResult": _CLUSTER,
    "Receiver": "mansio.client.share.receiver",
    "RecordId": _DELAYS,
    "RecordMetadata": _TYPES,
    "RedriveResult": "mansio.net.redrive",
    "Remedy": _REMEDIES,
    "RemedyKind": _REMEDIES,
    "CatchUp": _SCHEDULES,
    "Schedule": _SCHEDULES,
    "ScheduleAdmin": _SCHEDULES,
    "ShareAdmin": _SHARES,
    "ShareGroupDescription": _SHARES,
    "ShareLeases": _SHARES,
    "ShareMember": _SHARES,
    "ShareOffset": _SHARES,
    "StartAt": _TYPES,
    "TopicDescription": _ADMIN,
    "TopicPartition": _TYPES,
    "RecordTrace": _TRACES,
    "CompatibilityResult": _SCHEMAS,
    "RegisteredVersion": _SCHEMAS,
    "SchemaAdmin": _SCHEMAS,
    "SchemaById": _SCHEMAS,
    "SchemaReference": "mansio.state.registry.schema",
    "TraceAdmin": _TRACES,
    "TraceEvent": _TRACES,
    "FoundRecord": _RECORD_SEARCH,
    "SearchProgress": _RECORD_SEARCH,
    "SkippedRange": _RECORD_SEARCH,
    "Transaction": "mansio.client.transactions.transaction",
    "HangingTransaction": _TRANSACTIONS,
    "PartitionProducer": _TRANSACTIONS,
    "TransactionAdmin": _TRANSACTIONS,
    "TransactionDescription": _TRANSACTIONS,
    "TransactionListing": _TRANSACTIONS,
    "TransactionListings": _TRANSACTIONS,
    "UnreadableCallback": "mansio.client.consumer.consumer",
    "DelegationToken": "mansio.net.delegation_tokens",
    "SqsAccessKey": _USERS,
    "TokenAdmin": "mansio.client.admin.tokens",
    "TokenProvider": "mansio.net.token_credentials",
    "User": _USERS,
    "UserAdmin": _USERS,
    "UserApiKey": _USERS,
    "NewApiKey": _USERS,
    "connect": "mansio.client.client",
}
"""Module that defines each name, and the name there if it differs (`module:name`)."""

_MODULES = ("blocking", "errors")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mansio.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'mansio' has no attribute {name!r}")
    module, _, attribute = _LAZY[name].partition(":")
    value = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
