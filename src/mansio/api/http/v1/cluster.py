"""The cluster over HTTP, and the description of this API."""

from __future__ import annotations

from typing import Final

from mansio.api.http.v1.operation import Call, Operation, Result


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


OPERATIONS: Final = (
    Operation("GET", "/cluster", "Describe the cluster", describe, result=Cluster, tag="cluster"),
)
