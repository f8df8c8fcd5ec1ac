"""The cluster over HTTP, and the description of this API."""

from __future__ import annotations

from typing import Any, Final

from mansio.api.http.v1.operation import Body, Call, Operation


class Broker(Body):
    node_id: int
    host: str
    port: int
    rack: str | None
    is_controller: bool
    is_fenced: bool


class Cluster(Body):
    cluster_id: str
    controller_id: int
    brokers: list[Broker]


async def describe(call: Call) -> dict[str, Any]:
    found = await call.client.admin.cluster.status()
    return {
        "cluster_id": found.cluster_id,
        "controller_id": found.controller_id,
        "brokers": [
            {
                "node_id": each.node_id,
                "host": each.host,
                "port": each.port,
                "rack": each.rack,
                "is_controller": each.is_controller,
                "is_fenced": each.is_fenced,
            }
            for each in found.brokers
        ],
    }


OPERATIONS: Final = (
    Operation("GET", "/cluster", "Describe the cluster", describe, result=Cluster, tag="cluster"),
)
