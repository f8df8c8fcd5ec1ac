"""Message move tasks: move the messages of a dead-letter queue back to their sources, or to another queue.

A message is sent to its destination before it is deleted; a task that is interrupted between the two leaves it in both.
A task ends with the access key that has started it. Tasks live in the memory of the broker that runs them: after a
restart they are gone and can be started again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from mansio.api.sqs.queues.queue_errors import (
    InvalidParameterValue,
    QueueDoesNotExist,
    ResourceNotFound,
    UnsupportedOperation,
)
from mansio.api.sqs.queues.queue_service import NewMessage
from mansio.broker.routing.caller import BROKER_CALLER
from mansio.errors import MansioError
from mansio.logs import fields
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.api.sqs.queues.messages import Message
    from mansio.api.sqs.queues.queue_service import Queue, QueueService
    from mansio.broker.routing.caller import Caller

logger = logging.getLogger(__name__)

TASKS_MAX: Final = 100
"""Maximum number of tasks that are known, of all queues."""
RATE_MAX: Final = 500
BATCH: Final = 10
VISIBILITY_S: Final = 60
RETRY_S: Final = 1.0
FAILURES_MAX: Final = 60

Status = Literal["RUNNING", "COMPLETED", "CANCELLED", "FAILED"]


@dataclass(slots=True)
class MoveTask:
    """One task. `destination`: name of a queue, "" for the source of each message. `started_ms`: since the epoch."""

    handle: str
    source: str
    destination: str
    per_second: int
    started_ms: int
    to_move: int
    caller: Caller
    status: Status = "RUNNING"
    moved: int = 0
    failure: str = ""
    work: asyncio.Task[None] | None = None


class MessageMover:
    """Runs message move tasks."""

    def __init__(self, queues: QueueService, has_key: Callable[[str, str], bool] = lambda *_: True) -> None:
        """`has_key`: whether a user exists and has the key with this id (`UserService.has_key`)."""
        self._queues = queues
        self._has_key = has_key
        self._tasks: OrderedDict[str, MoveTask] = OrderedDict()

    async def start(
        self, source: Queue, destination: str, per_second: int, now_ms: int, *, caller: Caller
    ) -> MoveTask:
        """Start to move all messages of a dead-letter queue, for `caller`. One task runs for a queue at a time.

        `destination`: name of a queue, "" for the source of each message. `per_second`: maximum number of messages a
        second, 0: no limit. `now_ms`: Unix time. Raises `AuthorizationFailed`,
        `InvalidParameterValue`, `ResourceNotFound`, `UnsupportedOperation`."""
        self._queues.check_move(source, "", caller=caller)
        if not self._queues.dead_letter_sources(source, caller=BROKER_CALLER):
            raise InvalidParameterValue("Source queue must be configured as a Dead Letter Queue.")
        if destination:
            try:
                target = self._queues.find(destination, caller=caller)
                self._queues.check_move(source, destination, caller=caller)
            except QueueDoesNotExist as error:
                raise ResourceNotFound(
                    "The resource that you specified for the DestinationArn parameter doesn't exist."
                ) from error
            if target.attributes.is_fifo is not source.attributes.is_fifo or target.name == source.name:
                raise InvalidParameterValue("The destination must be another queue of the same type.")
        if not 0 <= per_second <= RATE_MAX:
            raise InvalidParameterValue(f"MaxNumberOfMessagesPerSecond is 1 to {RATE_MAX}.")
        if any(each.source == source.name and each.status == "RUNNING" for each in self._tasks.values()):
            raise UnsupportedOperation(
                "There is already a task running. Only one active task is allowed for a source queue."
            )
        self._remove_ended()
        task = MoveTask(str(uuid.uuid4()), source.name, destination, per_second, now_ms, 0, caller)
        self._tasks[task.handle] = task  # before the wait, during which another request may start one
        try:
            counts = await self._queues.count_messages(source, caller=caller)
        except BaseException:
            self._tasks.pop(task.handle, None)
            raise
        task.to_move = int(counts["ApproximateNumberOfMessages"])
        if task.status == "RUNNING":  # not cancelled meanwhile
            task.work = asyncio.get_running_loop().create_task(self._run(task), name="move messages")
        return task

    def _remove_ended(self) -> None:
        """Forget the oldest tasks that have ended, so that another one can be added. Raises `UnsupportedOperation` if
        `TASKS_MAX` tasks run."""
        ended = [handle for handle, each in self._tasks.items() if each.status != "RUNNING"]
        for handle in ended[: max(len(self._tasks) + 1 - TASKS_MAX, 0)]:
            del self._tasks[handle]
        if len(self._tasks) >= TASKS_MAX:
            raise UnsupportedOperation(f"{TASKS_MAX} tasks run already.")

    def list_tasks(self, source: Queue, limit: int) -> list[MoveTask]:
        """Return the newest tasks of a queue, the newest first."""
        found = [each for each in reversed(self._tasks.values()) if each.source == source.name]
        return found[:limit]

    def cancel(self, handle: str, *, caller: Caller) -> MoveTask:
        """Cancel a running task. Raises `ResourceNotFound`, and `AuthorizationFailed` unless the caller could start
        it."""
        task = self._tasks.get(handle)
        if task is None or task.status != "RUNNING":
            raise ResourceNotFound("The task does not exist, or does not run.")
        self._queues.check_move(self._queues.find(task.source, caller=caller), "", caller=caller)
        task.status = "CANCELLED"
        if task.work is not None:
            task.work.cancel()
        return task

    def close(self) -> None:
        """Stop all tasks."""
        for task in self._tasks.values():
            if task.work is not None:
                task.work.cancel()

    async def _run(self, task: MoveTask) -> None:
        try:
            await self._move_all(task)
        except Exception:  # otherwise the task would be shown as running for ever
            task.status, task.failure = "FAILED", "InternalError"
            logger.exception("message_move_failed", extra=fields(queue=task.source))

    async def _move_all(self, task: MoveTask) -> None:
        failures, session = 0, task.caller.session
        while True:
            if session.credential_id and not self._has_key(session.user, session.credential_id):
                task.status, task.failure = (
                    "FAILED",
                    "The access key that started the task, or its user, was deleted.",
                )
                return
            try:
                source = self._queues.find(task.source, caller=task.caller)
                _, messages = await self._queues.receive(
                    source,
                    messages_max=BATCH,
                    wait_s=1,
                    visibility_timeout_s=VISIBILITY_S,
                    caller=task.caller,
                )
                if not messages and await self._queues.is_drained(source, caller=task.caller):
                    task.status = "COMPLETED"
                    return
                await self._move(task, source, messages)
                failures = 0
            except MansioError as error:
                failures += 1
                if failures >= FAILURES_MAX or isinstance(error, QueueDoesNotExist):
                    task.status, task.failure = "FAILED", error.message
                    return
                await asyncio.sleep(RETRY_S)
                continue
            if task.per_second and messages:
                await asyncio.sleep(len(messages) / task.per_second)

    async def _move(self, task: MoveTask, source: Queue, messages: list[Message]) -> None:
        """Move messages one after the other, in their order."""
        for message in messages:
            destination = self._queues.find(
                task.destination or message.dead_letter_source, caller=task.caller
            )
            new = NewMessage(
                message.body.encode(),
                message.attributes,
                None if destination.attributes.is_fifo else 0,
                message.group_id,
                f"{message.message_id}-{task.handle}" if destination.attributes.is_fifo else None,
                message.trace_header,
            )
            (result,) = await self._queues.send(destination, [new], caller=task.caller)
            if isinstance(result, MansioError):
                raise copied(result)
            await self._queues.delete_messages(source, [message.receipt_handle], caller=task.caller)
            task.moved += 1
