"""Attributes and tags of a queue, as JSON in the setting `mansio.queue.attributes` of its topic.

Source: Amazon SQS API reference, CreateQueue.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from mansio.api.sqs.queues.queue_errors import (
    InvalidAttributeName,
    InvalidAttributeValue,
    InvalidParameterValue,
    UnsupportedOperation,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ACCOUNT: Final = "000000000000"
REGION: Final = "us-east-1"
ARN_PREFIX: Final = f"arn:aws:sqs:{REGION}:{ACCOUNT}:"

MESSAGE_BYTES_MAX: Final = 1_048_576
RECEIVE_COUNT_MAX: Final = 1_000
TAGS_MAX: Final = 50

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,80}|[A-Za-z0-9_-]{1,75}\.fifo")

READ_ONLY: Final = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesDelayed",
    "ApproximateNumberOfMessagesNotVisible",
    "CreatedTimestamp",
    "LastModifiedTimestamp",
    "QueueArn",
)


@dataclass(frozen=True, slots=True)
class RedrivePolicy:
    """Name of the dead-letter queue, and the number of receives after which a message goes there."""

    queue: str
    receive_count_max: int


@dataclass(frozen=True, slots=True)
class QueueAttributes:
    """Attributes of one queue. `other`: attributes that are stored and returned, but have no effect."""

    is_fifo: bool = False
    visibility_timeout_s: int = 30
    delay_s: int = 0
    wait_s: int = 0
    retention_s: int = 345_600
    message_bytes_max: int = MESSAGE_BYTES_MAX
    content_based_deduplication: bool = False
    deduplication_scope: str = "queue"
    fifo_throughput_limit: str = "perQueue"
    redrive: RedrivePolicy | None = None
    redrive_allow: str = ""
    created_s: int = 0
    modified_s: int = 0
    other: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Encode the attributes for the setting of the topic."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> QueueAttributes:
        """Decode the setting of a topic. Members that this version does not know are ignored."""
        known = {name: value for name, value in json.loads(text).items() if name in QueueAttributes.__slots__}
        if known.get("redrive"):
            known["redrive"] = RedrivePolicy(**known["redrive"])
        return QueueAttributes(**known)

    def described(self, name: str) -> dict[str, str]:
        """Return the attributes of the queue `name` under their names in the API, apart from its message counts."""
        found = {
            "CreatedTimestamp": str(self.created_s),
            "DelaySeconds": str(self.delay_s),
            "LastModifiedTimestamp": str(self.modified_s),
            "MaximumMessageSize": str(self.message_bytes_max),
            "MessageRetentionPeriod": str(self.retention_s),
            "QueueArn": ARN_PREFIX + name,
            "ReceiveMessageWaitTimeSeconds": str(self.wait_s),
            "VisibilityTimeout": str(self.visibility_timeout_s),
            "SqsManagedSseEnabled": "false",
        }
        if self.is_fifo:
            found |= {
                "ContentBasedDeduplication": _text(self.content_based_deduplication),
                "DeduplicationScope": self.deduplication_scope,
                "FifoQueue": "true",
                "FifoThroughputLimit": self.fifo_throughput_limit,
            }
        if self.redrive is not None:
            policy = {
                "deadLetterTargetArn": ARN_PREFIX + self.redrive.queue,
                "maxReceiveCount": self.redrive.receive_count_max,
            }
            found["RedrivePolicy"] = json.dumps(policy, separators=(",", ":"))
        if self.redrive_allow:
            found["RedriveAllowPolicy"] = self.redrive_allow
        return {**found, **self.other}

    def changed(self, attributes: Mapping[str, str]) -> QueueAttributes:
        """Return the attributes with those of a request, under their names in the API.

        Raises `InvalidAttributeName`, `InvalidAttributeValue`."""
        found = self
        for name, text in attributes.items():
            change = _CHANGES.get(name)
            if change is None:
                raise InvalidAttributeName(f"Unknown Attribute {name}.")
            found = change(found, text)
        if not found.is_fifo and any(name in attributes for name in _FIFO_ONLY):
            name = next(name for name in _FIFO_ONLY if name in attributes)
            raise InvalidAttributeName(f"Unknown Attribute {name}.")
        return found

    def allows_source(self, source: str) -> bool:
        """Return whether the queue `source` may use this one as its dead-letter queue."""
        if not self.redrive_allow:
            return True
        policy = json.loads(self.redrive_allow)
        permission = policy.get("redrivePermission")
        return permission == "allowAll" or (
            permission == "byQueue" and ARN_PREFIX + source in policy.get("sourceQueueArns", ())
        )


def check_queue_name(name: str, *, is_fifo: bool) -> None:
    """Raise `InvalidParameterValue` if a queue cannot have this name."""
    if not _NAME.fullmatch(name) or name.endswith(".fifo") is not is_fifo:
        raise InvalidParameterValue(
            "The name of a FIFO queue can only include alphanumeric characters, hyphens, or underscores, must end with "
            ".fifo suffix and be 1 to 80 in length."
            if is_fifo
            else "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length"
        )


def queue_of_arn(arn: object) -> str:
    """Return the name of the queue with this ARN. Raises `InvalidParameterValue`."""
    parts = str(arn).split(":")
    if len(parts) != 6 or parts[:1] != ["arn"] or parts[2] != "sqs" or not parts[5]:
        raise InvalidParameterValue(f"Value {str(arn)[:200]} is not the ARN of a queue.")
    return parts[5]


def _text(value: bool) -> str:
    return "true" if value else "false"


def _integer(
    member: str, name: str, least: int, most: int
) -> Callable[[QueueAttributes, str], QueueAttributes]:
    def change(found: QueueAttributes, text: str) -> QueueAttributes:
        value = int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else least - 1
        if not least <= value <= most:
            raise InvalidAttributeValue(
                f"Invalid value for the parameter {name}. Reason: must be {least} to {most}."
            )
        changes: dict[str, Any] = {member: value}
        return replace(found, **changes)

    return change


def _choice(
    member: str, name: str, values: Mapping[str, Any]
) -> Callable[[QueueAttributes, str], QueueAttributes]:
    def change(found: QueueAttributes, text: str) -> QueueAttributes:
        if text not in values:
            raise InvalidAttributeValue(
                f"Invalid value for the parameter {name}. Reason: one of {', '.join(values)}."
            )
        return replace(found, **{member: values[text]})

    return change


def _fifo(found: QueueAttributes, text: str) -> QueueAttributes:
    if text != _text(found.is_fifo):
        raise InvalidAttributeValue(
            "Invalid value for the parameter FifoQueue. Reason: it follows from the name of the queue."
        )
    return found


def _redrive(found: QueueAttributes, text: str) -> QueueAttributes:
    if not text:
        return replace(found, redrive=None)
    policy = _policy(text, "RedrivePolicy")
    count = policy.get("maxReceiveCount")
    if isinstance(count, str) and re.fullmatch("[0-9]{1,4}", count):
        count = int(count)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= RECEIVE_COUNT_MAX:
        raise InvalidParameterValue(
            f"Value {text[:200]} for parameter RedrivePolicy is invalid. Reason: maxReceiveCount is 1 to 1000."
        )
    if not policy.get("deadLetterTargetArn"):
        raise InvalidParameterValue(
            f"Value {text[:200]} for parameter RedrivePolicy is invalid. Reason: it needs deadLetterTargetArn."
        )
    return replace(found, redrive=RedrivePolicy(queue_of_arn(policy["deadLetterTargetArn"]), count))


def _redrive_allow(found: QueueAttributes, text: str) -> QueueAttributes:
    if text:
        policy = _policy(text, "RedriveAllowPolicy")
        arns = policy.get("sourceQueueArns", [])
        if policy.get("redrivePermission") not in ("allowAll", "denyAll", "byQueue") or not (
            isinstance(arns, list) and len(arns) <= 10 and all(isinstance(each, str) for each in arns)
        ):
            raise InvalidAttributeValue("Invalid value for the parameter RedriveAllowPolicy.")
    return replace(found, redrive_allow=text)


def _policy(text: str, name: str) -> dict[str, Any]:
    try:
        policy = json.loads(text)
    except (ValueError, RecursionError):
        policy = None
    if not isinstance(policy, dict):
        raise InvalidAttributeValue(
            f"Invalid value for the parameter {name}. Reason: it is not a JSON object."
        )
    return policy


def _without_effect(name: str) -> Callable[[QueueAttributes, str], QueueAttributes]:
    def change(found: QueueAttributes, text: str) -> QueueAttributes:
        others = _without(found.other, name)
        return replace(found, other={**others, name: text} if text else others)

    return change


def _refused(_found: QueueAttributes, text: str) -> QueueAttributes:
    raise UnsupportedOperation(f"Messages are not encrypted by the broker: {text[:100]}")


def _encryption(found: QueueAttributes, text: str) -> QueueAttributes:
    return found if text == "false" else _refused(found, text)


def _without(attributes: Mapping[str, str], name: str) -> dict[str, str]:
    return {each: value for each, value in attributes.items() if each != name}


_BOOLEANS: Final = {"true": True, "false": False}
_CHANGES: Final[Mapping[str, Callable[[QueueAttributes, str], QueueAttributes]]] = {
    "VisibilityTimeout": _integer("visibility_timeout_s", "VisibilityTimeout", 0, 43_200),
    "DelaySeconds": _integer("delay_s", "DelaySeconds", 0, 900),
    "ReceiveMessageWaitTimeSeconds": _integer("wait_s", "ReceiveMessageWaitTimeSeconds", 0, 20),
    "MessageRetentionPeriod": _integer("retention_s", "MessageRetentionPeriod", 60, 1_209_600),
    "MaximumMessageSize": _integer("message_bytes_max", "MaximumMessageSize", 1024, MESSAGE_BYTES_MAX),
    "FifoQueue": _fifo,
    "ContentBasedDeduplication": _choice(
        "content_based_deduplication", "ContentBasedDeduplication", _BOOLEANS
    ),
    "DeduplicationScope": _choice(
        "deduplication_scope", "DeduplicationScope", {"queue": "queue", "messageGroup": "messageGroup"}
    ),
    "FifoThroughputLimit": _choice(
        "fifo_throughput_limit",
        "FifoThroughputLimit",
        {"perQueue": "perQueue", "perMessageGroupId": "perMessageGroupId"},
    ),
    "RedrivePolicy": _redrive,
    "RedriveAllowPolicy": _redrive_allow,
    "Policy": _without_effect("Policy"),
    "KmsMasterKeyId": _refused,
    "KmsDataKeyReusePeriodSeconds": _refused,
    "SqsManagedSseEnabled": _encryption,
}
_FIFO_ONLY: Final = ("ContentBasedDeduplication", "DeduplicationScope", "FifoThroughputLimit")
ATTRIBUTE_NAMES: Final = (*READ_ONLY, *_CHANGES)
