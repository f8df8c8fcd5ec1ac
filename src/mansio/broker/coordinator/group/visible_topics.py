"""Topics as the members of one consumer group may see them, with an authorizer.

A regular expression of a group has one result, whichever of its members subscribe to it, as in Kafka. It contains the
topics that the member may describe whose heartbeat has resolved it. An expression is resolved again by the first
heartbeat of a subscribed member after a change of the topics or of the ACLs, and when a member subscribes to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.state.consumer_group.types import Topics

PATTERNS_MAX: Final = 1_000
"""Maximum number of expressions of one group whose results are kept. The group keeps what it has stored for others."""


class Viewer(NamedTuple):
    """Who resolves an expression. `revision`: of the ACLs; `visible`: returns the topics among some that the viewer may
    describe."""

    revision: int
    visible: Callable[[Sequence[str]], Sequence[str]]


class _Result(NamedTuple):
    base: Topics
    revision: int
    names: tuple[str, ...]


class VisibleTopics:
    """The topics of one group. `topics` is the same object as long as nothing has changed."""

    __slots__ = ("_base", "_results", "topics")

    def __init__(self, base: Topics) -> None:
        self._base = base
        self._results: dict[str, _Result] = {}
        self.topics = base._replace(matches={})

    def update(
        self, base: Topics, pattern: str = "", viewer: Viewer | None = None, *, is_new: bool = False
    ) -> Topics:
        """Return the topics, after resolving the expression of `viewer` where that is due. `base`: the existing topics
        with what the expression matches; `is_new`: the viewer subscribes to the expression."""
        changed = base is not self._base
        self._base = base
        matched = base.matches.get(pattern) if viewer is not None and pattern else None
        if viewer is not None and matched is not None:
            known = self._results.get(pattern)
            if is_new or known is None or known.base is not base or known.revision != viewer.revision:
                names = tuple(viewer.visible(matched))
                changed = changed or known is None or known.names != names
                self._results.pop(pattern, None)
                self._results[pattern] = _Result(base, viewer.revision, names)
                if len(self._results) > PATTERNS_MAX:
                    del self._results[next(iter(self._results))]
        if changed:
            matches = {
                each: tuple(name for name in result.names if name in base.ids)
                for each, result in self._results.items()
            }
            self.topics = base._replace(matches=matches)
        return self.topics
