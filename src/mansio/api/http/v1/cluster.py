"""The cluster over HTTP, and the description of this API."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from mansio.api.http.v1.operation import Call, Operation, Result
from mansio.api.http.v1.values import encode_key
from mansio.client.admin.hot_partitions import KeyAccess  # noqa: TC001  # pydantic needs it
from mansio.state.hot_partitions.remedies import RemedyKind  # noqa: TC001  # pydantic needs it


class Broker(Result):
    node_id: int
    host: str
    port: int
    rack: str | None
    is_controller: bool
    is_fenced: bool


class Cluster(Result):
    cluster_id: str
    controller_id: int
    brokers: list[Broker]


async def describe(call: Call) -> Cluster:
    return Cluster.model_validate(await call.client.admin.cluster.status())


class LeaderMove(Result):
    source: int
    target: int
    busy_before: float = Field(description="Part of a processor core that the broker with more load uses.")
    busy_after: float = Field(description="The same after the move, of both brokers.")


class Remedy(Result):
    kind: RemedyKind
    reason: str
    group: str | None = Field(description="The group that is furthest behind.")
    move: LeaderMove | None
    partitions: int | None = Field(description="Number of partitions of the grown topic.")


class HotKey(Result):
    key: str | None = Field(None, description="Key, if it is UTF-8.")
    key_base64: str = Field("", description="Key, if it is not UTF-8.")
    share_min: float = Field(description="Part of the sampled records that have the key at least.")
    share_max: float = Field(description="Part of the sampled records that have the key at most.")


class HotPartition(Result):
    topic: str
    partition: int
    leader: int
    rate: float = Field(description="Records per second.")
    median_rate: float = Field(description="Median of the rates of the topic's partitions.")
    topic_rate: float
    partition_count: int
    led_s: float = Field(description="For how long the leader has led it, in seconds.")
    replicas: list[int]
    in_sync_replicas: list[int]
    is_compacted: bool
    key_access: KeyAccess
    sampled_records: int
    keys: list[HotKey] = Field(description="Most frequent keys, for callers that may read the topic.")
    remedies: list[Remedy] = Field(description="What helps, the first thing first.")


class BrokerLoad(Result):
    node_id: int
    rate: float = Field(description="Records per second that the broker takes in.")
    busy: float = Field(description="Part of a processor core that it uses.")


class HotPartitions(Result):
    partitions: list[HotPartition]
    brokers: list[BrokerLoad]
    unanswered: list[int] = Field(description="Brokers that did not answer.")
    disabled: list[int] = Field(description="Brokers that do not look for hot partitions.")


async def describe_hot_partitions(call: Call) -> HotPartitions:
    found = await call.client.admin.cluster.hot_partitions()
    partitions = []
    for each in found.partitions:
        keys = [
            {**encode_key(one.key), "share_min": one.share_min, "share_max": one.share_max}
            for one in each.keys
        ]
        fields = {name: getattr(each, name) for name in HotPartition.model_fields if name != "keys"}
        partitions.append(HotPartition.model_validate({**fields, "keys": keys}))
    brokers = [BrokerLoad.model_validate(each) for each in found.brokers]
    return HotPartitions(
        partitions=partitions,
        brokers=brokers,
        unanswered=sorted(found.errors),
        disabled=[*found.disabled],
    )


OPERATIONS: Final = (
    Operation("GET", "/cluster", "Describe the cluster", describe, result=Cluster, tag="cluster"),
    Operation(
        "GET",
        "/cluster/hot-partitions",
        "List hot partitions, and what helps",
        describe_hot_partitions,
        result=HotPartitions,
        tag="cluster",
    ),
)
