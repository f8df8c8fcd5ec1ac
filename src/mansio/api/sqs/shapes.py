"""Shapes of the parameters of each action, and the names of lists and maps in the Query protocol.

The JSON protocol is checked against these shapes; the Query protocol, which has texts only, is decoded with them.
Source: Amazon SQS API reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mansio.api.sqs.queues.queue_errors import (
    InvalidParameterValue,
    MissingParameter,
    TooManyEntriesInBatchRequest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

ITEMS_MAX: Final = 1_000
INTEGER_MAX: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a parameter.

    `kind`: text, integer, boolean, list, map or structure. `item`: of a list or of the values of a map. `members`: of a
    structure; `required`: which of them. `query_names`: name of an item of a list, or of the entries, keys and values
    of a map, in the Query protocol."""

    kind: str
    item: Shape | None = None
    members: Mapping[str, Shape] | None = None
    required: tuple[str, ...] = ()
    query_names: tuple[str, ...] = ()


TEXT: Final = Shape("text")
INTEGER: Final = Shape("integer")
BOOLEAN: Final = Shape("boolean")


def structure(*required: str, **members: Shape) -> Shape:
    """Return the shape of a structure."""
    return Shape("structure", members=members, required=required)


def _list(item: Shape, query_name: str) -> Shape:
    return Shape("list", item, query_names=(query_name,))


def _map(item: Shape, *query_names: str) -> Shape:
    return Shape("map", item, query_names=query_names)


_QUEUE: Final = {"QueueUrl": TEXT}
_ATTRIBUTES: Final = _map(TEXT, "Attribute", "Name", "Value")
_TAGS: Final = _map(TEXT, "Tag", "Key", "Value")
_VALUE: Final = structure(
    "DataType",
    DataType=TEXT,
    StringValue=TEXT,
    BinaryValue=TEXT,
    StringListValues=_list(TEXT, "StringListValue"),
    BinaryListValues=_list(TEXT, "BinaryListValue"),
)
_MESSAGE: Final = {
    "MessageBody": TEXT,
    "DelaySeconds": INTEGER,
    "MessageAttributes": _map(_VALUE, "MessageAttribute", "Name", "Value"),
    "MessageSystemAttributes": _map(_VALUE, "MessageSystemAttribute", "Name", "Value"),
    "MessageDeduplicationId": TEXT,
    "MessageGroupId": TEXT,
}
_CHANGE: Final = {"ReceiptHandle": TEXT, "VisibilityTimeout": INTEGER}

REQUESTS: Final[Mapping[str, Shape]] = {
    "AddPermission": structure(
        "QueueUrl",
        "Label",
        **_QUEUE,
        Label=TEXT,
        AWSAccountIds=_list(TEXT, "AWSAccountId"),
        Actions=_list(TEXT, "ActionName"),
    ),
    "CancelMessageMoveTask": structure("TaskHandle", TaskHandle=TEXT),
    "ChangeMessageVisibility": structure(
        "QueueUrl", "ReceiptHandle", "VisibilityTimeout", **_QUEUE, **_CHANGE
    ),
    "ChangeMessageVisibilityBatch": structure(
        "QueueUrl",
        "Entries",
        **_QUEUE,
        Entries=_list(
            structure("Id", "ReceiptHandle", Id=TEXT, **_CHANGE), "ChangeMessageVisibilityBatchRequestEntry"
        ),
    ),
    "CreateQueue": structure("QueueName", QueueName=TEXT, Attributes=_ATTRIBUTES, tags=_TAGS),
    "DeleteMessage": structure("QueueUrl", "ReceiptHandle", **_QUEUE, ReceiptHandle=TEXT),
    "DeleteMessageBatch": structure(
        "QueueUrl",
        "Entries",
        **_QUEUE,
        Entries=_list(
            structure("Id", "ReceiptHandle", Id=TEXT, ReceiptHandle=TEXT), "DeleteMessageBatchRequestEntry"
        ),
    ),
    "DeleteQueue": structure("QueueUrl", **_QUEUE),
    "GetQueueAttributes": structure("QueueUrl", **_QUEUE, AttributeNames=_list(TEXT, "AttributeName")),
    "GetQueueUrl": structure("QueueName", QueueName=TEXT, QueueOwnerAWSAccountId=TEXT),
    "ListDeadLetterSourceQueues": structure("QueueUrl", **_QUEUE, NextToken=TEXT, MaxResults=INTEGER),
    "ListMessageMoveTasks": structure("SourceArn", SourceArn=TEXT, MaxResults=INTEGER),
    "ListQueueTags": structure("QueueUrl", **_QUEUE),
    "ListQueues": structure(QueueNamePrefix=TEXT, NextToken=TEXT, MaxResults=INTEGER),
    "PurgeQueue": structure("QueueUrl", **_QUEUE),
    "ReceiveMessage": structure(
        "QueueUrl",
        **_QUEUE,
        AttributeNames=_list(TEXT, "AttributeName"),
        MessageSystemAttributeNames=_list(TEXT, "MessageSystemAttributeName"),
        MessageAttributeNames=_list(TEXT, "MessageAttributeName"),
        MaxNumberOfMessages=INTEGER,
        VisibilityTimeout=INTEGER,
        WaitTimeSeconds=INTEGER,
        ReceiveRequestAttemptId=TEXT,
    ),
    "RemovePermission": structure("QueueUrl", "Label", **_QUEUE, Label=TEXT),
    "SendMessage": structure("QueueUrl", "MessageBody", **_QUEUE, **_MESSAGE),
    "SendMessageBatch": structure(
        "QueueUrl",
        "Entries",
        **_QUEUE,
        Entries=_list(structure("Id", "MessageBody", Id=TEXT, **_MESSAGE), "SendMessageBatchRequestEntry"),
    ),
    "SetQueueAttributes": structure("QueueUrl", "Attributes", **_QUEUE, Attributes=_ATTRIBUTES),
    "StartMessageMoveTask": structure(
        "SourceArn", SourceArn=TEXT, DestinationArn=TEXT, MaxNumberOfMessagesPerSecond=INTEGER
    ),
    "TagQueue": structure("QueueUrl", "Tags", **_QUEUE, Tags=_TAGS),
    "UntagQueue": structure("QueueUrl", "TagKeys", **_QUEUE, TagKeys=_list(TEXT, "TagKey")),
}

RESULT_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "Attributes": ("Attribute", "Name", "Value"),
    "MessageAttributes": ("MessageAttribute", "Name", "Value"),
    "Tags": ("Tag", "Key", "Value"),
    "QueueUrls": ("QueueUrl",),
    "queueUrls": ("QueueUrl",),
    "Messages": ("Message",),
    "Failed": ("BatchResultErrorEntry",),
    "Results": ("ListMessageMoveTasksResultEntry",),
}
"""Names of the items of lists, and of the entries, keys and values of maps, in results of the Query protocol."""


def checked(shape: Shape, value: Any, name: str) -> Any:
    """Return a JSON value that has the shape, without unknown members. Raises `InvalidParameterValue`,
    `MissingParameter`, `TooManyEntriesInBatchRequest`."""
    kind, item = shape.kind, shape.item
    if kind == "text":
        if isinstance(value, str):
            return value
    elif kind == "integer":
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= INTEGER_MAX:
            return value
    elif kind == "boolean":
        if isinstance(value, bool):
            return value
    elif kind == "list" and item is not None:
        if name == "Entries" and isinstance(value, list) and len(value) > ITEMS_MAX:
            raise TooManyEntriesInBatchRequest(
                f"Maximum number of entries per request are 10. You have sent {len(value)}."
            )
        if isinstance(value, list) and len(value) <= ITEMS_MAX:
            return [checked(item, each, name) for each in value]
    elif kind == "map" and item is not None:
        if isinstance(value, dict) and len(value) <= ITEMS_MAX:
            return {key: checked(item, each, f"{name}.{key}"[:200]) for key, each in value.items()}
    elif isinstance(value, dict):
        return _checked_structure(shape, value)
    raise InvalidParameterValue(f"The parameter {name} is not a {kind}, or too large.")


def _checked_structure(shape: Shape, value: Mapping[str, Any]) -> dict[str, Any]:
    members = shape.members or {}
    found = {
        name: checked(members[name], each, name)
        for name, each in value.items()
        if name in members and each is not None
    }
    for name in shape.required:
        if name not in found:
            raise MissingParameter(f"The request must contain the parameter {name}.")
    return found
