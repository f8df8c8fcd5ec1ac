"""Subject name strategies: the subject of the schemas of a topic's keys or values."""

from __future__ import annotations

from enum import StrEnum

from mansio.errors import ConfigError


class SubjectNames(StrEnum):
    """What the subject of a schema is named after (subject name strategy)."""

    TOPIC = "topic"
    """TOPIC-key and TOPIC-value: all records of a topic have versions of one schema."""
    RECORD = "record"
    """Name of the record type: the topics with a type share its schemas."""
    TOPIC_RECORD = "topic-record"
    """TOPIC-NAME, where NAME is that of the record type: a topic has several types."""

    def subject(self, topic: str, record_name: str, *, is_key: bool) -> str:
        """Return the subject. `record_name`: name of the record type, empty if it is not known. Raises `ConfigError` if
        the strategy needs it."""
        if self is SubjectNames.TOPIC:
            return f"{topic}-{'key' if is_key else 'value'}"
        if not record_name:
            raise ConfigError(
                f"the subject names {self.value!r} need the name of the record: give the subject instead"
            )
        return record_name if self is SubjectNames.RECORD else f"{topic}-{record_name}"
