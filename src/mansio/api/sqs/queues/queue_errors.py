"""Errors of queues, named as in the API of Amazon SQS. `query_code`: the code in the older Query protocol, if it is
another one."""

from __future__ import annotations

from typing import ClassVar

from mansio.errors import RequestError


class QueueError(RequestError):
    """The request is invalid."""

    code: ClassVar[str] = "InvalidParameterValue"
    query_code: ClassVar[str] = ""


class InvalidParameterValue(QueueError):
    """A parameter has an invalid value."""


class MissingParameter(QueueError):
    """A required parameter is missing."""

    code = "MissingParameter"


class InvalidAddress(QueueError):
    """The address of the queue is not valid."""

    code = "InvalidAddress"


class QueueDoesNotExist(QueueError):
    """The specified queue does not exist."""

    code = "QueueDoesNotExist"
    query_code = "AWS.SimpleQueueService.NonExistentQueue"


class QueueNameExists(QueueError):
    """A queue already exists with the same name and a different value of an attribute."""

    code = "QueueNameExists"
    query_code = "QueueAlreadyExists"


class InvalidAttributeName(QueueError):
    """The attribute does not exist."""

    code = "InvalidAttributeName"


class InvalidAttributeValue(QueueError):
    """The attribute has an invalid value."""

    code = "InvalidAttributeValue"


class InvalidMessageContents(QueueError):
    """The message contains characters outside of the allowed set."""

    code = "InvalidMessageContents"


class ReceiptHandleIsInvalid(QueueError):
    """The receipt handle is not valid."""

    code = "ReceiptHandleIsInvalid"
    http_status = 404


class MessageNotInflight(QueueError):
    """The message is not in flight."""

    code = "MessageNotInflight"
    query_code = "AWS.SimpleQueueService.MessageNotInflight"


class EmptyBatchRequest(QueueError):
    """The batch request contains no entries."""

    code = "EmptyBatchRequest"
    query_code = "AWS.SimpleQueueService.EmptyBatchRequest"


class TooManyEntriesInBatchRequest(QueueError):
    """The batch request contains more entries than permissible."""

    code = "TooManyEntriesInBatchRequest"
    query_code = "AWS.SimpleQueueService.TooManyEntriesInBatchRequest"


class BatchEntryIdsNotDistinct(QueueError):
    """Two entries of the batch have the same id."""

    code = "BatchEntryIdsNotDistinct"
    query_code = "AWS.SimpleQueueService.BatchEntryIdsNotDistinct"


class InvalidBatchEntryId(QueueError):
    """The id of an entry has 1 to 80 alphanumeric characters, hyphens and underscores."""

    code = "InvalidBatchEntryId"
    query_code = "AWS.SimpleQueueService.InvalidBatchEntryId"


class BatchRequestTooLong(QueueError):
    """The messages of the batch are longer than permissible in total."""

    code = "BatchRequestTooLong"
    query_code = "AWS.SimpleQueueService.BatchRequestTooLong"


class UnsupportedOperation(QueueError):
    """The operation is not supported."""

    code = "UnsupportedOperation"
    query_code = "AWS.SimpleQueueService.UnsupportedOperation"


class ResourceNotFound(QueueError):
    """The resource does not exist."""

    code = "ResourceNotFoundException"
    http_status = 404
