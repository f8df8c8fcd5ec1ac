"""Topics as consumer groups see them, with regular expressions resolved (KIP-848, SubscribedTopicRegex).

All groups of this broker use one `Topics` object, which is replaced when a topic is created, deleted, recreated or gets
more partitions, so that a group detects such changes by identity. Changes of leaders or in-sync replicas have no
effect.

Regular expressions have the syntax of RE2 (`name_pattern`). An expression must match the whole name; internal topics
match, too, as in Kafka. An expression is matched against all names once, and later only against names that were created
or deleted since then. So an expression that a member sends with every heartbeat costs little.

Invariants:
* `Topics.matches` contains the expressions passed to `topics`, except those dropped by the next limit.
* At most `PATTERNS_MAX` expressions are kept, the most recently used ones, and at most `TOPIC_CHANGES_MAX` names of
  created or deleted topics.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from mansio.broker.coordinator.name_pattern import compile_pattern
from mansio.errors import InvalidRegularExpression
from mansio.logs import fields
from mansio.state.consumer_group.types import Topics

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mansio.metadata.model import Topic, TopicChange

logger = logging.getLogger(__name__)

PATTERNS_MAX: Final = 1_000
"""Maximum number of expressions whose matches are kept."""
TOPIC_CHANGES_MAX: Final = 1_000
"""Maximum number of names of created or deleted topics that are kept."""


class TopicResolver:
    """Provider of the topics as consumer groups see them. `topics`: existing topics by name, kept current by the
    metadata image; the caller calls `update` for every change."""

    def __init__(self, topics: Mapping[str, Topic]) -> None:
        self._metadata_topics = topics
        self._view: Topics | None = None
        self._matches: dict[str, tuple[str, ...]] = {}  # of the current view
        self._resolved: dict[str, tuple[int, tuple[str, ...]]] = {}  # seen changes, matching names
        self._topic_changes: list[
            str
        ] = []  # created or deleted names, from number `_dropped_change_count` on
        self._dropped_change_count = 0
        self._names: dict[bytes, str] = {}

    def update(self, change: TopicChange) -> None:
        """Handle a change of a topic. If a name, an id or a partition count has changed, the next call of `topics`
        returns a new object."""
        before, after = change.before, change.after
        if _compared_fields(before) == _compared_fields(after):
            return
        self._view = None
        names = {_topic_name(before): None, _topic_name(after): None}
        if len(names) > 1:
            self._topic_changes += [name for name in names if name is not None]
        if len(self._topic_changes) > TOPIC_CHANGES_MAX:
            self._dropped_change_count += len(self._topic_changes)
            self._topic_changes.clear()

    def topics(self, patterns: Iterable[str] = ()) -> Topics:
        """Return the topics with at least these expressions resolved. An invalid expression matches nothing; `check`
        detects it."""
        view = self._view or self._build_view()
        for pattern in patterns:
            if pattern in self._matches:
                self._resolved[pattern] = self._resolved.pop(pattern)
            else:
                self._resolve(pattern)
        return view

    def name_of(self, topic_id: bytes) -> str | None:
        """Return the name of the topic with this id; None if it does not exist."""
        if self._view is None:
            self._build_view()
        return self._names.get(topic_id)

    def check(self, pattern: str) -> None:
        """Raise `InvalidRegularExpression` unless it is a valid RE2 expression."""
        self.topics()
        if pattern and pattern not in self._matches:
            compile_pattern(pattern)

    def _build_view(self) -> Topics:
        ids, partitions = {}, {}
        self._names = {}
        for name, topic in self._metadata_topics.items():
            topic_id = topic.topic_id.bytes
            ids[name] = topic_id
            partitions[topic_id] = len(topic.partitions)
            self._names[topic_id] = name
        self._matches = {}
        self._view = Topics(ids, partitions, self._matches)
        return self._view

    def _resolve(self, pattern: str) -> None:
        seen, found = self._resolved.pop(pattern, (-1, ()))
        now = self._dropped_change_count + len(self._topic_changes)
        if seen != now:
            found = self._find_matches(pattern, seen, found)
        while len(self._resolved) >= PATTERNS_MAX:
            oldest = next(iter(self._resolved))
            del self._resolved[oldest]
            self._matches.pop(oldest, None)
        self._resolved[pattern] = now, found
        self._matches[pattern] = found

    def _find_matches(self, pattern: str, seen: int, before: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names that match the expression now. `before`: the names that matched after the first `seen` topic
        changes."""
        try:
            is_match = compile_pattern(pattern)
        except InvalidRegularExpression as error:
            logger.warning("stored_regex_invalid", extra=fields(reason=error))
            return ()
        names: Iterable[str] = self._metadata_topics
        found = {}
        if seen >= self._dropped_change_count:
            names = dict.fromkeys(self._topic_changes[seen - self._dropped_change_count :])
            found = {name: None for name in before if name not in names}
        for name in names:
            topic = self._metadata_topics.get(name)
            if topic is not None and is_match(name):
                found[name] = None
        return tuple(sorted(found))


def _topic_name(topic: Topic | None) -> str | None:
    return None if topic is None else topic.name


def _compared_fields(topic: Topic | None) -> tuple[str, Any, int] | None:
    return None if topic is None else (topic.name, topic.topic_id, len(topic.partitions))
