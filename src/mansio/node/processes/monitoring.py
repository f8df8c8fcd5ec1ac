"""Health checks and metrics of several broker processes at one address.

`/health/live`: 200 whenever the supervisor can respond. `/health/ready`: 200 if all brokers are ready; the body has
what each of them reports, by node id:

    {"ready": false, "degraded": true, "processes": {
      "1": {"pid": 4711, "ready": true, ...},
      "2": {"pid": 4712, "ready": false, "degraded": false, "warnings": [],
            "reasons": [{"reason": "not_running", "detail": "it does not run"}]}}}

`/metrics` has the metrics of all brokers, each with the label `process`, and those of the supervisor.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final, Protocol

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mansio.errors import Unavailable
from mansio.node.processes.merged_metrics import family, merge_metrics, process_label

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from mansio.node.processes.control_channel import ChannelResponse

HEALTH_S_MAX: Final = 3.0
METRICS_S_MAX: Final = 10.0
TEXT_FORMAT: Final = "text/plain; version=0.0.4; charset=utf-8"


class MonitoredProcess(Protocol):
    """A broker process."""

    @property
    def is_running(self) -> bool: ...

    @property
    def pid(self) -> int:
        """The process id of the last start; 0 if there was none."""

    @property
    def restarts(self) -> int: ...

    async def get(self, path: str, within_s: float) -> ChannelResponse:
        """Ask the broker for a path. Raises `Unavailable`."""


class MonitoredMember(Protocol):
    """The etcd member of the supervisor."""

    @property
    def is_running(self) -> bool: ...

    @property
    def restarts(self) -> int: ...


def monitoring_app(processes: Mapping[int, MonitoredProcess], member: MonitoredMember | None) -> Starlette:
    """Return the ASGI application. `processes`: by node id. `member`: None if the supervisor runs no etcd."""

    async def live(_request: Request) -> JSONResponse:
        return JSONResponse({"live": True})

    async def ready(_request: Request) -> JSONResponse:
        found = await asyncio.gather(*(_health(each) for each in processes.values()))
        is_ready = all(each["ready"] for each in found)
        body = {
            "ready": is_ready,
            "degraded": any(each["degraded"] for each in found),
            "processes": dict(zip(map(str, processes), found, strict=True)),
        }
        return JSONResponse(body, status_code=200 if is_ready else 503)

    async def metrics(_request: Request) -> Response:
        texts = await asyncio.gather(*(_metrics(each) for each in processes.values()))
        merged = await asyncio.to_thread(merge_metrics, dict(zip(processes, texts, strict=True)))
        return Response(_own_metrics(processes, member) + merged, media_type=TEXT_FORMAT)

    return Starlette(
        routes=[
            Route("/health/live", live),
            Route("/health/ready", ready),
            Route("/metrics", metrics),
        ]
    )


async def _health(process: MonitoredProcess) -> dict[str, Any]:
    try:
        body: dict[str, Any] = json.loads((await process.get("/health/ready", HEALTH_S_MAX)).body)
    except (Unavailable, ValueError) as error:
        reason = {"reason": "not_running", "detail": str(error)}
        body = {"reasons": [reason], "warnings": []}
    return {"pid": process.pid, "ready": False, "degraded": False, **body}


async def _metrics(process: MonitoredProcess) -> str:
    """Return the metrics of a broker; nothing if it does not answer."""
    try:
        found = await process.get("/metrics", METRICS_S_MAX)
    except Unavailable:
        return ""
    return found.body.decode(errors="replace") if found.status == 200 else ""


def _own_metrics(processes: Mapping[int, MonitoredProcess], member: MonitoredMember | None) -> str:
    text = family(
        "mansio_broker_process_up",
        "gauge",
        "Whether the process of the broker runs.",
        ((process_label(node_id), each.is_running) for node_id, each in processes.items()),
    )
    text += family(
        "mansio_broker_process_restarts_total",
        "counter",
        "Restarts of the broker after its process ended by itself.",
        ((process_label(node_id), each.restarts) for node_id, each in processes.items()),
    )
    if member is not None:
        text += family(
            "mansio_etcd_process_up", "gauge", "Whether the etcd member runs.", [("", member.is_running)]
        )
        text += family(
            "mansio_etcd_process_restarts_total",
            "counter",
            "Restarts of the etcd member after its process ended by itself.",
            [("", member.restarts)],
        )
    return text
