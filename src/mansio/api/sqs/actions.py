"""Actions of Amazon SQS: each decodes its checked parameters, calls the queue service and encodes the result."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from mansio.api.required_rights import SQS, check_rows
from mansio.api.sqs.queues.message_moves import MessageMover
from mansio.api.sqs.queues.messages import (
    ATTRIBUTES_MAX,
    MessageAttribute,
    attributes_md5,
    check_attribute,
    check_body,
    decode_binary,
    size_bytes,
)
from mansio.api.sqs.queues.queue_attributes import (
    ACCOUNT,
    ARN_PREFIX,
    ATTRIBUTE_NAMES,
    MESSAGE_BYTES_MAX,
    queue_of_arn,
)
from mansio.api.sqs.queues.queue_errors import (
    BatchEntryIdsNotDistinct,
    BatchRequestTooLong,
    EmptyBatchRequest,
    InvalidAddress,
    InvalidAttributeName,
    InvalidBatchEntryId,
    InvalidParameterValue,
    MissingParameter,
    QueueDoesNotExist,
    QueueError,
    ResourceNotFound,
    TooManyEntriesInBatchRequest,
    UnsupportedOperation,
)
from mansio.api.sqs.queues.queue_service import NewMessage
from mansio.errors import AuthorizationFailed, MansioError, UnknownTopicOrPartition
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from mansio.api.sqs.queues.messages import Message
    from mansio.api.sqs.queues.queue_service import Queue, QueueService, SentMessage
    from mansio.broker.routing.caller import Caller
    from mansio.ports import Clock

BATCH_MAX: Final = 10
DELAY_S_MAX: Final = 900
VISIBILITY_S_MAX: Final = 43_200
WAIT_S_MAX: Final = 20
PAGE_MAX: Final = 1_000

_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")
_TOKEN: Final = re.compile(r"[\x21-\x7e]{1,128}")
"""A MessageGroupId or MessageDeduplicationId."""

ACCESS_DENIED: Final = "AccessDeniedException"
"""Code of the error of a caller that has no right for an action; in the Query protocol `AccessDenied`."""

TRACE_ATTRIBUTE: Final = "AWSTraceHeader"


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of an action. `action`: its name. `base_url`: of the endpoint as the client reaches it. `access_key`: of
    the sender. `disconnected`: done when the connection has ended."""

    action: str
    parameters: Mapping[str, Any]
    base_url: str
    access_key: str
    caller: Caller
    disconnected: asyncio.Future[Any]


class Actions:
    """The actions of one broker."""

    def __init__(self, queues: QueueService, clock: Clock, has_key: Callable[[str, str], bool]) -> None:
        """`has_key`: whether a user exists and has the key with this id."""
        self._queues = queues
        self._clock = clock
        self._mover = MessageMover(queues, has_key)
        self.by_name: Mapping[str, Callable[[Invocation], Awaitable[dict[str, Any]]]] = {
            "AddPermission": _permissions,
            "CancelMessageMoveTask": self._cancel_message_move_task,
            "ChangeMessageVisibility": self._change_message_visibility,
            "ChangeMessageVisibilityBatch": self._change_message_visibility_batch,
            "CreateQueue": self._create_queue,
            "DeleteMessage": self._delete_message,
            "DeleteMessageBatch": self._delete_message_batch,
            "DeleteQueue": self._delete_queue,
            "GetQueueAttributes": self._get_queue_attributes,
            "GetQueueUrl": self._get_queue_url,
            "ListDeadLetterSourceQueues": self._list_dead_letter_source_queues,
            "ListMessageMoveTasks": self._list_message_move_tasks,
            "ListQueueTags": self._list_queue_tags,
            "ListQueues": self._list_queues,
            "PurgeQueue": self._purge_queue,
            "ReceiveMessage": self._receive_message,
            "RemovePermission": _permissions,
            "SendMessage": self._send_message,
            "SendMessageBatch": self._send_message_batch,
            "SetQueueAttributes": self._set_queue_attributes,
            "StartMessageMoveTask": self._start_message_move_task,
            "TagQueue": self._tag_queue,
            "UntagQueue": self._untag_queue,
        }
        check_rows("SQS", SQS, self.by_name)

    def close(self) -> None:
        """Stop the message move tasks."""
        self._mover.close()

    def _queue(self, call: Invocation) -> Queue:
        """Return the queue of a request. Raises `InvalidAddress`, `QueueDoesNotExist`."""
        url = str(call.parameters["QueueUrl"])
        try:
            path = urlsplit(url).path
        except ValueError as error:
            raise InvalidAddress(f"The address {url[:200]} is not valid for this endpoint.") from error
        account, _, name = path.strip("/").rpartition("/")
        if not name or account not in ("", ACCOUNT):
            raise InvalidAddress(f"The address {url[:200]} is not valid for this endpoint.")
        return self._queues.find(unquote(name), caller=call.caller)

    # Queues

    async def _create_queue(self, call: Invocation) -> dict[str, Any]:
        name = call.parameters["QueueName"]
        attributes = dict(call.parameters.get("Attributes", {}))
        _check_writable(attributes)
        queue = await self._queues.create(
            name, attributes, call.parameters.get("tags", {}), caller=call.caller
        )
        return {"QueueUrl": _url(call, queue.name)}

    async def _delete_queue(self, call: Invocation) -> dict[str, Any]:
        await self._queues.delete(self._queue(call), caller=call.caller)
        return {}

    async def _get_queue_url(self, call: Invocation) -> dict[str, Any]:
        queue = self._queues.find(call.parameters["QueueName"], caller=call.caller)
        return {"QueueUrl": _url(call, queue.name)}

    async def _list_queues(self, call: Invocation) -> dict[str, Any]:
        prefix = call.parameters.get("QueueNamePrefix", "")
        names = self._queues.list_names(prefix, _page_start(call), caller=call.caller)
        return _page(call, names, "QueueUrls")

    async def _list_dead_letter_source_queues(self, call: Invocation) -> dict[str, Any]:
        after = _page_start(call)
        names = self._queues.dead_letter_sources(self._queue(call), caller=call.caller)
        names = [name for name in names if name > after]
        return {"queueUrls": [], **_page(call, names, "queueUrls")}

    async def _get_queue_attributes(self, call: Invocation) -> dict[str, Any]:
        queue = self._queue(call)
        names = call.parameters.get("AttributeNames", [])
        for name in names:
            if name != "All" and name not in ATTRIBUTE_NAMES:
                raise InvalidAttributeName(f"Unknown Attribute {name[:100]}.")
        found = queue.attributes.described(queue.name)
        if any(name == "All" or name.startswith("Approximate") for name in names):
            found |= await self._queues.count_messages(queue, caller=call.caller)
        wanted = {name: text for name, text in found.items() if "All" in names or name in names}
        return {"Attributes": wanted} if wanted else {}

    async def _set_queue_attributes(self, call: Invocation) -> dict[str, Any]:
        attributes = call.parameters["Attributes"]
        _check_writable(attributes)
        await self._queues.set_attributes(self._queue(call), attributes, caller=call.caller)
        return {}

    async def _purge_queue(self, call: Invocation) -> dict[str, Any]:
        await self._queues.purge(self._queue(call), caller=call.caller)
        return {}

    async def _list_queue_tags(self, call: Invocation) -> dict[str, Any]:
        tags = self._queue(call).attributes.tags
        return {"Tags": dict(tags)} if tags else {}

    async def _tag_queue(self, call: Invocation) -> dict[str, Any]:
        queue, tags = self._queue(call), call.parameters["Tags"]
        if not tags:
            raise MissingParameter("The request must contain the parameter Tags.")
        await self._queues.change_tags(queue, tags, caller=call.caller)
        return {}

    async def _untag_queue(self, call: Invocation) -> dict[str, Any]:
        queue, keys = self._queue(call), call.parameters["TagKeys"]
        if not keys:
            raise InvalidParameterValue("Tag keys must be between 1 and 128 characters in length.")
        await self._queues.change_tags(queue, {}, keys, caller=call.caller)
        return {}

    # Sending

    async def _send_message(self, call: Invocation) -> dict[str, Any]:
        queue = self._queue(call)
        message, _ = _new_message(queue, call.parameters)
        (result,) = await self._queues.send(queue, [message], caller=call.caller)
        if isinstance(result, MansioError):
            raise copied(result)
        return _sent(message, result, call.parameters)

    async def _send_message_batch(self, call: Invocation) -> dict[str, Any]:
        queue, entries = self._queue(call), _entries(call)
        messages: dict[str, NewMessage] = {}
        failed: list[dict[str, Any]] = []
        total_bytes = 0
        for entry in entries:
            try:
                messages[entry["Id"]], size = _new_message(queue, entry)
            except QueueError as error:
                size = len(entry["MessageBody"].encode(errors="replace"))
                failed.append(_failure(entry["Id"], error))
            total_bytes += size
        if total_bytes > MESSAGE_BYTES_MAX:
            raise BatchRequestTooLong(
                f"Batch requests cannot be longer than {MESSAGE_BYTES_MAX} bytes. You have sent {total_bytes} bytes."
            )
        results = await self._queues.send(queue, list(messages.values()), caller=call.caller)
        by_id = {entry["Id"]: entry for entry in entries}
        successful = []
        for (id_, message), result in zip(messages.items(), results, strict=True):
            if isinstance(result, MansioError):
                failed.append(_failure(id_, result))
            else:
                successful.append({"Id": id_, **_sent(message, result, by_id[id_])})
        return _batch_result(successful, failed)

    # Receiving

    async def _receive_message(self, call: Invocation) -> dict[str, Any]:
        queue, parameters = self._queue(call), call.parameters
        messages_max = _bounded(parameters, "MaxNumberOfMessages", 1, BATCH_MAX)
        wait_s = _bounded(parameters, "WaitTimeSeconds", 0, WAIT_S_MAX)
        visibility_s = _bounded(parameters, "VisibilityTimeout", 0, VISIBILITY_S_MAX)
        work = asyncio.ensure_future(
            self._queues.receive(
                queue,
                messages_max=1 if messages_max is None else messages_max,
                wait_s=wait_s,
                visibility_timeout_s=visibility_s,
                caller=call.caller,
            )
        )
        try:
            await asyncio.wait({work, call.disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return {}
            member_id, messages = work.result()
        finally:
            work.cancel()
            await asyncio.wait({work})
        if call.disconnected.done():
            await self._queues.release(queue, member_id, caller=call.caller)
            return {}
        found = [self._received(call, queue, each) for each in messages]
        return {"Messages": found} if found else {}

    def _received(self, call: Invocation, queue: Queue, message: Message) -> dict[str, Any]:
        parameters = call.parameters
        found: dict[str, Any] = {
            "MessageId": message.message_id,
            "ReceiptHandle": message.receipt_handle,
            "MD5OfBody": _md5(message.body),
            "Body": message.body,
        }
        wanted = {*parameters.get("AttributeNames", ()), *parameters.get("MessageSystemAttributeNames", ())}
        if wanted:
            system = self._system_attributes(queue, message)
            found["Attributes"] = {
                name: text for name, text in system.items() if "All" in wanted or name in wanted
            }
        names = parameters.get("MessageAttributeNames", ())
        chosen = {name: one for name, one in message.attributes.items() if _is_wanted(name, names)}
        if chosen:
            found["MD5OfMessageAttributes"] = attributes_md5(chosen)
            found["MessageAttributes"] = {name: _attribute_value(one) for name, one in chosen.items()}
        return found

    def _system_attributes(self, queue: Queue, message: Message) -> dict[str, str]:
        found = {
            "SenderId": ACCOUNT,
            "SentTimestamp": str(message.sent_ms),
            "ApproximateReceiveCount": str(message.receive_count),
            "ApproximateFirstReceiveTimestamp": str(self._queues.first_receive_ms(queue, message)),
        }
        if queue.attributes.is_fifo:
            found["SequenceNumber"] = f"{message.offset:020d}"
        optional = {
            "MessageGroupId": message.group_id,
            "MessageDeduplicationId": message.deduplication_id,
            TRACE_ATTRIBUTE: message.trace_header,
        }
        found |= {name: text for name, text in optional.items() if text is not None}
        if message.dead_letter_source:
            found["DeadLetterQueueSourceArn"] = ARN_PREFIX + message.dead_letter_source
        return found

    async def _delete_message(self, call: Invocation) -> dict[str, Any]:
        handles = [call.parameters["ReceiptHandle"]]
        _raise_first(await self._queues.delete_messages(self._queue(call), handles, caller=call.caller))
        return {}

    async def _delete_message_batch(self, call: Invocation) -> dict[str, Any]:
        queue, entries = self._queue(call), _entries(call)
        handles = [entry["ReceiptHandle"] for entry in entries]
        results = await self._queues.delete_messages(queue, handles, caller=call.caller)
        return _batch_of(entries, results)

    async def _change_message_visibility(self, call: Invocation) -> dict[str, Any]:
        change = call.parameters["ReceiptHandle"], _visibility(call.parameters)
        _raise_first(await self._queues.change_visibility(self._queue(call), [change], caller=call.caller))
        return {}

    async def _change_message_visibility_batch(self, call: Invocation) -> dict[str, Any]:
        queue, entries = self._queue(call), _entries(call)
        results: list[MansioError | None] = []
        changes: list[tuple[str, int]] = []
        for entry in entries:
            try:
                if "VisibilityTimeout" not in entry:
                    raise MissingParameter("The request must contain the parameter VisibilityTimeout.")
                changes.append((entry["ReceiptHandle"], _visibility(entry)))
                results.append(None)
            except QueueError as error:
                results.append(without_traceback(error))
        found = iter(await self._queues.change_visibility(queue, changes, caller=call.caller))
        return _batch_of(entries, [next(found) if each is None else each for each in results])

    # Message move tasks

    async def _start_message_move_task(self, call: Invocation) -> dict[str, Any]:
        destination = call.parameters.get("DestinationArn", "")
        task = await self._mover.start(
            self._queue_of_arn(call),
            queue_of_arn(destination) if destination else "",
            call.parameters.get("MaxNumberOfMessagesPerSecond", 0),
            self._clock.wall_ms(),
            caller=call.caller,
        )
        return {"TaskHandle": task.handle}

    async def _cancel_message_move_task(self, call: Invocation) -> dict[str, Any]:
        task = self._mover.cancel(call.parameters["TaskHandle"], caller=call.caller)
        return {"ApproximateNumberOfMessagesMoved": task.moved}

    async def _list_message_move_tasks(self, call: Invocation) -> dict[str, Any]:
        limit = call.parameters.get("MaxResults", 1)
        if not 1 <= limit <= BATCH_MAX:
            raise InvalidParameterValue(f"MaxResults is 1 to {BATCH_MAX}.")
        source = self._queue_of_arn(call)
        results = []
        for task in self._mover.list_tasks(source, limit):
            one: dict[str, Any] = {
                "Status": task.status,
                "SourceArn": ARN_PREFIX + task.source,
                "ApproximateNumberOfMessagesMoved": task.moved,
                "ApproximateNumberOfMessagesToMove": task.to_move,
                "StartedTimestamp": task.started_ms,
            }
            if task.status == "RUNNING":
                one["TaskHandle"] = task.handle
            if task.destination:
                one["DestinationArn"] = ARN_PREFIX + task.destination
            if task.per_second:
                one["MaxNumberOfMessagesPerSecond"] = task.per_second
            if task.failure:
                one["FailureReason"] = task.failure
            results.append(one)
        return {"Results": results}

    def _queue_of_arn(self, call: Invocation) -> Queue:
        try:
            return self._queues.find(queue_of_arn(call.parameters["SourceArn"]), caller=call.caller)
        except QueueDoesNotExist as error:
            raise ResourceNotFound(
                "The resource that you specified for the SourceArn parameter doesn't exist."
            ) from error


async def _permissions(call: Invocation) -> dict[str, Any]:  # noqa: ARG001 - the signature of actions
    raise UnsupportedOperation(
        "Policies of queues are not supported: access control lists (mansio acl) give rights."
    )


def _check_writable(attributes: Mapping[str, str]) -> None:
    for name in attributes:
        if name not in ATTRIBUTE_NAMES or name.startswith("Approximate") or name == "QueueArn":
            raise InvalidAttributeName(f"Unknown Attribute {name[:100]}.")


def _url(call: Invocation, name: str) -> str:
    return f"{call.base_url}/{ACCOUNT}/{name}"


def _page_start(call: Invocation) -> str:
    """Return the name behind which a page begins. Raises `InvalidParameterValue`."""
    limit = call.parameters.get("MaxResults", 1)
    if not 1 <= limit <= PAGE_MAX:
        raise InvalidParameterValue(f"MaxResults is 1 to {PAGE_MAX}.")
    try:
        return base64.b64decode(call.parameters.get("NextToken", ""), validate=True).decode()
    except ValueError as error:
        raise InvalidParameterValue("Invalid or expired next token.") from error


def _page(call: Invocation, names: Sequence[str], member: str) -> dict[str, Any]:
    """Return a page of queues. As in SQS, there is a next one only if the request has MaxResults."""
    limit = call.parameters.get("MaxResults", PAGE_MAX)
    page = names[:limit]
    found: dict[str, Any] = {member: [_url(call, name) for name in page]} if page else {}
    if "MaxResults" in call.parameters and len(names) > limit:
        found["NextToken"] = base64.b64encode(page[-1].encode()).decode()
    return found


def _entries(call: Invocation) -> list[dict[str, Any]]:
    """Return the entries of a batch. Raises the errors of the batch as a whole."""
    entries: list[dict[str, Any]] = call.parameters["Entries"]
    if not entries:
        raise EmptyBatchRequest(f"There should be at least one {call.action}RequestEntry in the request.")
    if len(entries) > BATCH_MAX:
        raise TooManyEntriesInBatchRequest(
            f"Maximum number of entries per request are {BATCH_MAX}. You have sent {len(entries)}."
        )
    seen: set[str] = set()
    for id_ in (entry["Id"] for entry in entries):
        if not _ID.fullmatch(id_):
            raise InvalidBatchEntryId(
                "A batch entry id can only contain alphanumeric characters, hyphens and underscores. It can be at most "
                "80 letters long."
            )
        if id_ in seen:
            raise BatchEntryIdsNotDistinct(f"Id {id_} repeated.")
        seen.add(id_)
    return entries


def _new_message(queue: Queue, parameters: Mapping[str, Any]) -> tuple[NewMessage, int]:
    """Return the message of a request and its size in bytes. Raises `InvalidParameterValue` and others."""
    body = check_body(parameters["MessageBody"])
    if not body:
        raise MissingParameter("The request must contain the parameter MessageBody.")
    attributes = _message_attributes(parameters.get("MessageAttributes", {}))
    size = size_bytes(body, attributes)
    if size > queue.attributes.message_bytes_max:
        raise InvalidParameterValue(
            f"One or more parameters are invalid. Reason: Message must be shorter than "
            f"{queue.attributes.message_bytes_max} bytes."
        )
    system = _message_attributes(parameters.get("MessageSystemAttributes", {}), is_system=True)
    group_id, deduplication_id = parameters.get("MessageGroupId"), parameters.get("MessageDeduplicationId")
    for name, text in (("MessageGroupId", group_id), ("MessageDeduplicationId", deduplication_id)):
        if text is not None and not _TOKEN.fullmatch(text):
            raise InvalidParameterValue(
                f"Value {text[:200]} for parameter {name} is invalid. Reason: {name} can only include alphanumeric and "
                "punctuation characters. 1 to 128 in length."
            )
    delay_s: int | None = parameters.get("DelaySeconds")
    if delay_s is not None and not 0 <= delay_s <= DELAY_S_MAX:
        raise InvalidParameterValue(
            f"Value {delay_s} for parameter DelaySeconds is invalid. Reason: DelaySeconds must be >= 0 and <= "
            f"{DELAY_S_MAX}."
        )
    if queue.attributes.is_fifo:
        if group_id is None:
            raise MissingParameter("The request must contain the parameter MessageGroupId.")
        if deduplication_id is None and not queue.attributes.content_based_deduplication:
            raise InvalidParameterValue(
                "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId provided "
                "explicitly"
            )
        if delay_s:
            raise InvalidParameterValue(
                f"Value {delay_s} for parameter DelaySeconds is invalid. Reason: The request include parameter that is "
                "not valid for this queue type."
            )
        delay_s = None  # 0, too, does not shorten the delay of the queue, which would change the order
    elif deduplication_id is not None:
        raise InvalidParameterValue(
            f"Value {deduplication_id} for parameter MessageDeduplicationId is invalid. Reason: The request includes a "
            "parameter that is not valid for this queue type."
        )
    trace = system.get(TRACE_ATTRIBUTE)
    message = NewMessage(
        body,
        attributes,
        delay_s,
        group_id,
        deduplication_id,
        None if trace is None else trace.content.decode(),
    )
    return message, size


def _message_attributes(values: Mapping[str, Any], *, is_system: bool = False) -> dict[str, MessageAttribute]:
    if len(values) > ATTRIBUTES_MAX:
        raise InvalidParameterValue(
            f"Number of message attributes [{len(values)}] exceeds the allowed maximum [{ATTRIBUTES_MAX}]."
        )
    found = {}
    for name, value in values.items():
        if is_system and (name != TRACE_ATTRIBUTE or value["DataType"] != "String"):
            raise InvalidParameterValue(
                f"The message system attribute {name[:100]!r} is not a String AWSTraceHeader."
            )
        text, binary = value.get("StringValue"), value.get("BinaryValue")
        if text is not None and binary is not None:
            raise InvalidParameterValue(f"The message attribute '{name[:100]}' has two values.")
        content = decode_binary(binary, name[:100]) if binary is not None else text
        found[name] = check_attribute(name, value["DataType"], content)
    return found


def _sent(message: NewMessage, result: SentMessage, parameters: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "MessageId": result.message_id,
        "MD5OfMessageBody": hashlib.md5(message.body, usedforsecurity=False).hexdigest(),
    }
    if message.attributes:
        found["MD5OfMessageAttributes"] = attributes_md5(message.attributes)
    if system := _message_attributes(parameters.get("MessageSystemAttributes", {}), is_system=True):
        found["MD5OfMessageSystemAttributes"] = attributes_md5(system)
    if result.sequence_number:
        found["SequenceNumber"] = result.sequence_number
    return found


def _attribute_value(one: MessageAttribute) -> dict[str, str]:
    if one.is_binary:
        return {"BinaryValue": base64.b64encode(one.content).decode(), "DataType": one.data_type}
    return {"StringValue": one.content.decode(errors="replace"), "DataType": one.data_type}


def _is_wanted(name: str, names: Sequence[str]) -> bool:
    return any(
        each in ("All", ".*", name) or (each.endswith(".*") and name.startswith(each[:-2])) for each in names
    )


def _bounded(parameters: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value: int | None = parameters.get(name)
    if value is not None and not least <= value <= most:
        raise InvalidParameterValue(
            f"Value {value} for parameter {name} is invalid. Reason: Must be between {least} and {most}, if provided."
        )
    return value


def _visibility(parameters: Mapping[str, Any]) -> int:
    return _bounded(parameters, "VisibilityTimeout", 0, VISIBILITY_S_MAX) or 0


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _raise_first(results: Sequence[MansioError | None]) -> None:
    if results[0] is not None:
        raise copied(results[0])


def _batch_of(entries: Sequence[Mapping[str, Any]], results: Sequence[MansioError | None]) -> dict[str, Any]:
    pairs = list(zip(entries, results, strict=True))
    successful = [{"Id": entry["Id"]} for entry, error in pairs if error is None]
    failed = [_failure(entry["Id"], error) for entry, error in pairs if error is not None]
    return _batch_result(successful, failed)


def _batch_result(successful: list[dict[str, Any]], failed: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"Successful": successful}
    if failed:
        found["Failed"] = failed
    return found


def _failure(id_: str, error: MansioError) -> dict[str, Any]:
    code, is_sender = error_code(error)
    return {"Id": id_, "Code": code, "Message": error.message, "SenderFault": is_sender}


def error_code(error: MansioError) -> tuple[str, bool]:
    """Return the code of an error, and whether the sender has to change its request."""
    if isinstance(error, QueueError):
        return error.code, True
    if isinstance(error, AuthorizationFailed):
        return ACCESS_DENIED, True
    if isinstance(error, UnknownTopicOrPartition):  # it was deleted meanwhile
        return QueueDoesNotExist.code, True
    if error.http_status in (429, 503, 504) or error.retriable:
        return ("ThrottlingException" if error.http_status == 429 else "ServiceUnavailable"), False
    return ("InvalidParameterValue", True) if 400 <= error.http_status < 500 else ("InternalFailure", False)
