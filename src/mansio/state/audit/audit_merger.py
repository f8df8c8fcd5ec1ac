"""Merger of audit events: repeats of an event become one line a minute, with their number.

The first event of a kind is a line at once, and begins a window. Repeats within the window are counted. If there are
any at its end, they are the next line, which begins the next window. So nothing that happens once waits, and a client
that repeats a refused request without end causes one line a minute.

A kind is a principal, API, outcome, operation and resource. What clients can choose is bounded: of one principal and
API at most `RESOURCES_MAX` refused resources have windows at the same time, and the others are one kind,
`OTHER_RESOURCES`. Beyond `PRINCIPAL_KINDS_MAX` windows of a principal, all its further refusals are one kind. A client
that asks for ever new names therefore takes no place of others.

A change that gets no window is a line at once, as is each repeat of it: it is not merged, and never lost.

Invariants:
* Each event is counted in exactly one line, or in `lost_count`, which has refusals only.
* At most `KINDS_MAX` windows exist, and `PRINCIPAL_KINDS_MAX` and one of a principal. Their ends are in the order of
  their beginnings.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

WINDOW_MS: Final = 60_000
KINDS_MAX: Final = 10_000
PRINCIPAL_KINDS_MAX: Final = 500
RESOURCES_MAX: Final = 100
OTHER_RESOURCES: Final = "(others)"
"""Name in place of the resources beyond a limit."""


class EventKind(NamedTuple):
    """What is merged. `operation`: of a refusal, the operation that is missing; of a change, CREATE for a topic that
    was created automatically, else "". `resource_type`: as in the commands, for example `topic`. All but principal and
    outcome are "" or `OTHER_RESOURCES` for further refusals of a principal."""

    principal: str
    api: str
    outcome: str
    operation: str
    resource_type: str
    resource: str


class AuditLine(NamedTuple):
    """Events of one kind. `event_count`: their number; `detail`: what the caller of `add` passed with the first of
    them; `first_ms` and `last_ms`: Unix times of the first and the last one."""

    kind: EventKind
    detail: object
    event_count: int
    first_ms: int
    last_ms: int


class _Window:
    """Repeats of a kind since `began_ms`. Without repeats, `detail` and `first_ms` are unused."""

    __slots__ = ("began_ms", "count", "detail", "first_ms", "last_ms")

    def __init__(self, began_ms: int) -> None:
        self.began_ms = began_ms
        self.count = 0
        self.detail: object = None
        self.first_ms = 0
        self.last_ms = 0


class AuditMerger:
    """The windows of one broker. Times are Unix times in milliseconds."""

    __slots__ = (
        "_kinds_max",
        "_principal_kinds_max",
        "_principals",
        "_resources",
        "_resources_max",
        "_window_ms",
        "_windows",
        "lost_count",
    )

    def __init__(
        self,
        window_ms: int = WINDOW_MS,
        kinds_max: int = KINDS_MAX,
        resources_max: int = RESOURCES_MAX,
        principal_kinds_max: int = PRINCIPAL_KINDS_MAX,
    ) -> None:
        self._window_ms = window_ms
        self._kinds_max = kinds_max
        self._resources_max = resources_max
        self._principal_kinds_max = principal_kinds_max
        self._windows: dict[EventKind, _Window] = {}
        self._resources: Counter[tuple[str, str]] = Counter()
        self._principals: Counter[str] = Counter()
        self.lost_count = 0
        """Number of refusals that are in no line, because there are too many kinds."""

    @property
    def window_count(self) -> int:
        """Number of windows."""
        return len(self._windows)

    def add(
        self, kind: EventKind, detail: object, now_ms: int, *, is_refusal: bool = True, event_count: int = 1
    ) -> AuditLine | None:
        """Count events; return their line if they are not merged with earlier ones. `is_refusal`: anybody can cause the
        event, for any resource; otherwise it is a change."""
        window = self._windows.get(kind)
        if window is None and is_refusal:
            if self._resources[kind.principal, kind.api] >= self._resources_max:
                kind = kind._replace(resource=OTHER_RESOURCES)
                window = self._windows.get(kind)
            if window is None and self._principals[kind.principal] >= self._principal_kinds_max:
                kind = EventKind(kind.principal, "", kind.outcome, "", "", OTHER_RESOURCES)
                window = self._windows.get(kind)
        if window is None:
            return self._begin(kind, detail, now_ms, is_refusal, event_count)
        if not window.count:
            window.detail = detail
            window.first_ms = now_ms
        window.count += event_count
        window.last_ms = now_ms
        return None

    def _begin(
        self, kind: EventKind, detail: object, now_ms: int, is_refusal: bool, event_count: int
    ) -> AuditLine | None:
        is_full = len(self._windows) >= self._kinds_max
        if is_refusal and is_full:
            self.lost_count += event_count
            return None
        if is_refusal or not (is_full or self._principals[kind.principal] >= self._principal_kinds_max):
            self._windows[kind] = _Window(now_ms)
            self._resources[kind.principal, kind.api] += 1
            self._principals[kind.principal] += 1
        return AuditLine(kind, detail, event_count, now_ms, now_ms)

    @property
    def next_end_ms(self) -> int | None:
        """The end of the window that ends first; None without windows."""
        for window in self._windows.values():
            return window.began_ms + self._window_ms
        return None

    def end_windows(self, now_ms: int) -> list[AuditLine]:
        """End the windows whose time is over; return the lines of their repeats. A clock that was set back ends none
        too early."""
        lines = []
        for kind, window in tuple(self._windows.items()):
            if window.began_ms + self._window_ms > now_ms:
                break
            del self._windows[kind]
            if window.count:
                lines.append(_line(kind, window))
                self._windows[kind] = _Window(now_ms)
            else:
                self._forget(kind)
        return lines

    def _forget(self, kind: EventKind) -> None:
        key = kind.principal, kind.api
        self._resources[key] -= 1
        if not self._resources[key]:
            del self._resources[key]
        self._principals[kind.principal] -= 1
        if not self._principals[kind.principal]:
            del self._principals[kind.principal]

    def end_all(self) -> list[AuditLine]:
        """End all windows; return the lines of their repeats."""
        lines = [_line(kind, window) for kind, window in self._windows.items() if window.count]
        self._windows.clear()
        self._resources.clear()
        self._principals.clear()
        return lines


def _line(kind: EventKind, window: _Window) -> AuditLine:
    return AuditLine(kind, window.detail, window.count, window.first_ms, window.last_ms)
