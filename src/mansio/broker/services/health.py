"""Health of this broker: problems because of which it is not ready, warnings, and whether its session is held.

`api.http` derives problems and warnings from the running broker and adds itself as their source; DescribeHealth and the
health checks of HTTP show the same ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.state.authorization.acls import CLUSTER_NAME, Operation, ResourceType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.services.cluster import ClusterServices
    from mansio.ports import Clock


class Problem(NamedTuple):
    """A problem of a running broker. `reason` is one of the reasons listed in `api.http.health`, `detail` is text for
    operators; `topic` and `partition` are set if it concerns one partition."""

    reason: str
    detail: str
    topic: str = ""
    partition: int = -1


class HealthReport(NamedTuple):
    """`problems`: why the broker is not ready; `warnings`: what does not affect that. `is_session_held`: whether the
    broker's session has certainly not expired; true on a single node, which has none. `session_lost_ms`: time since the
    Unix epoch from which it is not held, -1 if it is held or the time is unknown. `host_labels`: labels of the hosts of
    all brokers that are not hosts of their own, by node id. `broker_epoch`: the epoch of the session that is held,
    which is another one after each start; -1 without one."""

    problems: Sequence[Problem]
    warnings: Sequence[Problem]
    is_session_held: bool
    session_lost_ms: int
    host_labels: Mapping[int, str]
    broker_epoch: int = -1


class HealthService:
    """Health of one broker. All methods run on its event loop."""

    def __init__(
        self,
        clock: Clock,
        cluster: ClusterServices | None,
        *,
        authorization: Authorization,
        host_labels: Callable[[], Mapping[int, str]],
    ) -> None:
        """`host_labels`: see `HealthReport`."""
        self._host_labels = host_labels
        self._clock = clock
        self._cluster = cluster
        self._authorization = authorization
        self._sources: tuple[Callable[[], Iterable[Problem]], Callable[[], Iterable[Problem]]] | None = None

    def use_sources(
        self, problems: Callable[[], Iterable[Problem]], warnings: Callable[[], Iterable[Problem]]
    ) -> None:
        """Take problems and warnings from these functions from now on."""
        self._sources = problems, warnings

    def may_describe(self, caller: Caller) -> bool:
        """Whether a caller may see problems, warnings and metrics, which name topics and groups: it needs DESCRIBE for
        the cluster."""
        return self._authorization.allows(caller, Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME)

    def report(self, *, caller: Caller) -> HealthReport:
        """Return the health of this broker now. Raises `ClusterAuthorizationFailed` without DESCRIBE for the
        cluster."""
        self._authorization.check_cluster(caller, Operation.DESCRIBE)
        problems, warnings = ((), ()) if self._sources is None else (tuple(each()) for each in self._sources)
        cluster = self._cluster
        labels = self._host_labels()
        if cluster is None:
            return HealthReport(
                problems, warnings, is_session_held=True, session_lost_ms=-1, host_labels=labels
            )
        session = cluster.session()
        if session is not None and cluster.is_session_valid():
            return HealthReport(
                problems,
                warnings,
                is_session_held=True,
                session_lost_ms=-1,
                host_labels=labels,
                broker_epoch=session.epoch,
            )
        lost_ms = -1
        if session is not None and session.epoch:
            lost_for_ms = (self._clock.monotonic() - session.valid_until) * 1000
            lost_ms = int(self._clock.wall_ms() - max(0.0, lost_for_ms))
        return HealthReport(
            problems, warnings, is_session_held=False, session_lost_ms=lost_ms, host_labels=labels
        )
