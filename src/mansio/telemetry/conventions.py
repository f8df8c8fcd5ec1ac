"""Names of attributes and metrics: OpenTelemetry's semantic conventions for messaging and for Kafka.

The conventions are not stable. As other instrumentations do, spans have the names of version 1.24 unless the
environment variable OTEL_SEMCONV_STABILITY_OPT_IN lists `messaging` (the current names, version 1.45) or
`messaging/dup` (both). Names of spans and of metrics are the current ones in any case: version 1.24 had other metrics.

Source: https://opentelemetry.io/docs/specs/semconv/messaging/ (1.45.0) and the same pages of 1.24.0.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    AttributeValue = str | int | bool
    Attributes = dict[str, AttributeValue]

OPT_IN_VARIABLE: Final = "OTEL_SEMCONV_STABILITY_OPT_IN"

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
PARTITION: Final = "messaging.destination.partition.id"
GROUP: Final = "messaging.consumer.group.name"
CLIENT_ID: Final = "messaging.client.id"
MESSAGE_COUNT: Final = "messaging.batch.message_count"
OFFSET: Final = "messaging.kafka.offset"
TOMBSTONE: Final = "messaging.kafka.message.tombstone"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"

SEND: Final = "send"
RECEIVE: Final = "receive"
PROCESS: Final = "process"
ACKNOWLEDGE: Final = "settle"
"""Types of operations."""

OPERATION_DURATION: Final = "messaging.client.operation.duration"
PROCESS_DURATION: Final = "messaging.process.duration"
SENT_MESSAGES: Final = "messaging.client.sent.messages"
CONSUMED_MESSAGES: Final = "messaging.client.consumed.messages"
DURATION_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Bounds of the buckets of durations, in seconds, that the conventions advise."""

FORMER_NAMES: Final = {
    OPERATION_TYPE: "messaging.operation",
    PARTITION: "messaging.kafka.destination.partition",
    GROUP: "messaging.kafka.consumer.group",
    CLIENT_ID: "messaging.client_id",
    OFFSET: "messaging.kafka.message.offset",
}
"""Current name -> name in version 1.24, where the two differ."""
ADDED_NAMES: Final = frozenset({OPERATION_NAME})
"""Names that version 1.24 does not have."""


class NameSet(Enum):
    """The names that the attributes of spans have."""

    FORMER = "former"
    CURRENT = "current"
    BOTH = "both"

    def apply(self, attributes: Attributes) -> Attributes:
        """Return attributes with current names under the names of this set."""
        if self is NameSet.CURRENT:
            return attributes
        former = _with_former_names(attributes)
        return former if self is NameSet.FORMER else {**former, **attributes}


def chosen_names(environment: Mapping[str, str] = os.environ) -> NameSet:
    """Return the names that OTEL_SEMCONV_STABILITY_OPT_IN chooses."""
    listed = {one.strip().lower() for one in environment.get(OPT_IN_VARIABLE, "").split(",")}
    if "messaging/dup" in listed:
        return NameSet.BOTH
    return NameSet.CURRENT if "messaging" in listed else NameSet.FORMER


def _with_former_names(attributes: Attributes) -> Attributes:
    former: Attributes = {}
    for name, value in attributes.items():
        if name == OPERATION_TYPE and value == SEND:
            value = "publish"
        elif name == PARTITION:
            value = int(value)
        if name not in ADDED_NAMES:
            former[FORMER_NAMES.get(name, name)] = value
    return former
