"""The two probes.

`/health/live`: 200 whenever the loop can answer; restarting helps only when it cannot.
`/health/ready`: 200 when the broker should get work; 503 with every reason as JSON otherwise:

    {"ready": false, "reasons": [{"reason": "log_failed", "detail": "flights-3: ..."}]}

Reasons: `starting` (the broker is not up yet), `stopping` (it drains), `log_failed` (a partition's log takes no
more writes), `partition_not_open` (it should be here and is not), `metadata_failed` (changes are not seen any more),
`loop_stalled` (the event loop stood still a moment ago).
Always true: at most `REASONS_MAX` reasons are listed, the count of the rest is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from starlette.responses import JSONResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request

    from mansio.api.http.loop_watch import LoopWatch
    from mansio.api.http.source import BrokerView

REASONS_MAX = 20


class Reason(NamedTuple):
    """Why the broker should get no work now. `reason` is one of the words above, `detail` is for people."""

    reason: str
    detail: str


def reasons(view: BrokerView, watch: LoopWatch) -> list[Reason]:
    """Everything that speaks against readiness; empty when ready."""
    found: list[Reason] = []
    if view.phase != "running":
        found.append(Reason(view.phase, f"the broker is {view.phase}"))
    found += [Reason(reason, detail) for reason, detail in view.problems()]
    found += [
        Reason("loop_stalled", f"the event loop stood still for {stall.lag_ms:.0f} ms")
        for stall in watch.recent_stalls()
    ]
    return found


def readiness_body(found: Iterable[Reason]) -> dict[str, object]:
    every = list(found)
    body: dict[str, object] = {
        "ready": not every,
        "reasons": [reason._asdict() for reason in every[:REASONS_MAX]],
    }
    if len(every) > REASONS_MAX:
        body["more"] = len(every) - REASONS_MAX
    return body


def routes(view: BrokerView, watch: LoopWatch) -> list[Route]:
    async def live(_request: Request) -> JSONResponse:
        return JSONResponse({"live": True})

    async def ready(_request: Request) -> JSONResponse:
        found = reasons(view, watch)
        return JSONResponse(readiness_body(found), status_code=503 if found else 200)

    return [Route("/health/live", live), Route("/health/ready", ready)]
