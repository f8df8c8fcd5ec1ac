"""Health checks.

`/health/live`: 200 whenever the event loop can respond; a restart helps only if it cannot. `/health/ready`: 200 if the
broker should receive traffic; otherwise 503 with every reason as JSON:

    {"ready": false, "degraded": true,
     "reasons": [{"reason": "log_failed", "detail": "flights-3: ...", "topic": "flights", "partition": 3}],
     "warnings": [{"reason": "disk_low", "detail": "..."}],
     "disk": {"data_dir": "/var/lib/mansio", "free_bytes": 123, "size_bytes": 456}}

On a listener that authenticates its clients, a request without credentials, or of a user who may not DESCRIBE the
cluster, gets `{"ready": false}` alone.

Reasons:
* `starting`: the broker is not ready yet. `stopping`: the broker completes its last requests.
* `log_failed`: a partition's log accepts no more writes. `log_corrupt`: a partition is damaged and was not opened.
  `partition_not_open`: a partition of this broker is not open.
* `metadata_failed`: metadata changes are no longer received; in a cluster the broker released its session.
* `event_loop_stalled`: the event loop is blocked, or was several times within half a minute.
* `session_not_held` (cluster): another broker may lead this broker's partitions, so it acknowledges nothing.

Warnings do not affect readiness; with any of them the broker is `degraded`:
* `event_loop_stalled`: the event loop was blocked within the last half minute, and is not any more.
* `corrupt_batch`: a reader found damage. `unreadable_batch`: readers stepped over a batch whose content a client has
  stored unreadable; the log is intact. `log_truncated`: the start truncated a log end that was not known to be flushed;
  shown until the next start.
* `disk_full`: writes fail. `disk_low`. `disk_unresponsive`: the file system does not report its free space.
* `certificate_expires_soon`: the certificate of the listeners should have been renewed by now.
* `secrets_key_missing`: secrets in the metadata are encrypted with a key that this broker does not have.
* `no_administrator`: no client can change access control lists.
* `token_keys_not_read`: the keys of the issuer of tokens could not be read at the last attempt.
* `hold_released`: records were deleted that a pipeline had not read. `holds_not_loaded`: nothing is deleted, because it
  is not known yet what pipelines still need.
* `dead_letters_pending`: dead letters could not be written at the last attempt.
* `delayed_records_near_limit`: a partition has so many pending records that it will soon refuse delayed ones.
* `deduplication_ids_near_limit`: a partition has so many deduplication ids that it will soon refuse others.
* `schedule_cannot_fire`: a recurring schedule of a partition is due and cannot fire.
* `transaction_open`: a transaction is open for longer than `transaction_open_warning_ms`. `transaction_may_hang`: one
  is open in a partition for longer than a coordinator allows, unless this broker coordinates it.
* `share_records_near_retention`: retention.ms will soon delete records that a share group has not processed.
* `holds_near_release`, `holds_not_enforced`: retention holds of pipelines will soon have no effect, or have none,
  because there is too little disk space.
* In a cluster: `etcd_unresponsive`, `etcd_member_down`, `replicas_not_in_sync`, `under_min_isr` (acks=all is rejected).

Invariant: at most `REASONS_MAX` reasons and as many warnings are listed, with the count of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import JSONResponse

from mansio.api.http.authentication import may_see_names
from mansio.api.http.path_route import PathRoute
from mansio.broker.services.health import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from mansio.api.http.broker_stats import BrokerStats
    from mansio.api.http.monitors import DiskMonitor, EventLoopMonitor

REASONS_MAX = 20
"""Maximum number of reasons, and of warnings, in a response."""


def reasons(view: BrokerStats, loop_monitor: EventLoopMonitor) -> list[Problem]:
    """Return all reasons for which the broker is not ready; empty if it is ready."""
    found: list[Problem] = []
    if view.phase != "running":
        found.append(Problem(view.phase, f"the broker is {view.phase}"))
    found += view.problems()
    if loop_monitor.is_stalling:
        found += stalls(loop_monitor)
    return found


def stalls(loop_monitor: EventLoopMonitor) -> list[Problem]:
    """Return the recent stalls of the event loop: reasons while they continue, otherwise warnings."""
    return [
        Problem("event_loop_stalled", f"the event loop stood still for {stall.lag_ms:.0f} ms")
        for stall in loop_monitor.recent_stalls()
    ]


def readiness_body(
    found: Sequence[Problem], warnings: Sequence[Problem] = (), disk: DiskMonitor | None = None
) -> dict[str, object]:
    """Return the JSON value of `/health/ready`."""
    if disk is not None:
        warnings = [*(Problem(reason, detail) for reason, detail in disk.warnings()), *warnings]
    body: dict[str, object] = {
        "ready": not found,
        "degraded": bool(warnings),
        "reasons": [_problem_json(problem) for problem in found[:REASONS_MAX]],
        "warnings": [_problem_json(problem) for problem in warnings[:REASONS_MAX]],
    }
    if len(found) > REASONS_MAX:
        body["more"] = len(found) - REASONS_MAX
    if len(warnings) > REASONS_MAX:
        body["more_warnings"] = len(warnings) - REASONS_MAX
    if disk is not None:
        body["disk"] = {"data_dir": disk.path, **(disk.space._asdict() if disk.space is not None else {})}
    return body


def _problem_json(problem: Problem) -> dict[str, object]:
    shown: dict[str, object] = {"reason": problem.reason, "detail": problem.detail}
    if problem.topic:
        shown |= {"topic": problem.topic, "partition": problem.partition}
    return shown


def routes(
    view: BrokerStats, loop_monitor: EventLoopMonitor, disk: DiskMonitor | None = None
) -> list[PathRoute]:
    async def live(_request: Request) -> JSONResponse:
        return JSONResponse({"live": True})

    async def ready(request: Request) -> JSONResponse:
        found = reasons(view, loop_monitor)
        if not may_see_names(request, view.may_describe):
            return JSONResponse({"ready": not found}, status_code=503 if found else 200)
        over = [] if loop_monitor.is_stalling else stalls(loop_monitor)
        body = readiness_body(found, (*view.warnings(), *over), disk)
        return JSONResponse(body, status_code=503 if found else 200)

    return [PathRoute("/health/live", live), PathRoute("/health/ready", ready)]
