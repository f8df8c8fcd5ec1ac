"""Message move tasks: one runs for a queue, whatever requests come at the same time, and each ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mansio.api.sqs.queues import message_moves
from mansio.api.sqs.queues.message_moves import MessageMover
from mansio.api.sqs.queues.queue_errors import UnsupportedOperation
from mansio.broker.routing.caller import ANONYMOUS, Caller, ClientSession
from support.virtual_time import run_virtually


class Queues:
    """A dead-letter queue from which nothing is received; `error`: what a receive raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def dead_letter_sources(self, _: Any, **__: Any) -> list[str]:
        return ["source"]

    def check_move(self, *_: Any, **__: Any) -> None:
        pass

    def find(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(name=name)

    async def count_messages(self, _: Any, **__: Any) -> dict[str, str]:
        await asyncio.sleep(0.1)
        return {"ApproximateNumberOfMessages": "7"}

    async def receive(self, *_: Any, **__: Any) -> Any:
        await asyncio.sleep(1)
        if self.error is not None:
            raise self.error
        return "", []

    async def is_drained(self, *_: Any, **__: Any) -> bool:
        return False


async def start(mover: MessageMover, name: str) -> Any:
    queue: Any = SimpleNamespace(name=name)
    return await mover.start(queue, "", 0, 0, caller=ANONYMOUS)


def test_of_requests_at_the_same_time_one_starts_a_task() -> None:
    async def scenario() -> None:
        queues: Any = Queues()
        mover = MessageMover(queues)
        found = await asyncio.gather(*(start(mover, "dead") for _ in range(4)), return_exceptions=True)
        assert sorted(type(each).__name__ for each in found) == ["MoveTask"] + 3 * ["UnsupportedOperation"]
        (task,) = (each for each in found if not isinstance(each, BaseException))
        assert (task.status, task.to_move) == ("RUNNING", 7)
        mover.cancel(task.handle, caller=ANONYMOUS)
        assert (await start(mover, "dead")).status == "RUNNING"
        mover.close()

    run_virtually(scenario())


def test_a_task_that_fails_unexpectedly_ends_and_can_be_started_again() -> None:
    async def scenario() -> None:
        queues: Any = Queues(ZeroDivisionError("a bug"))
        mover = MessageMover(queues)
        task = await start(mover, "dead")
        await asyncio.sleep(2)
        assert (task.status, task.failure) == ("FAILED", "InternalError")
        assert (await start(mover, "dead")).status == "RUNNING"
        mover.close()

    run_virtually(scenario())


def test_a_task_ends_when_the_key_that_has_started_it_is_deleted() -> None:
    async def scenario() -> None:
        queues: Any = Queues()
        known = {("alice", "key")}
        mover = MessageMover(queues, lambda *key: key in known)
        session = ClientSession("alice", credential_id="key")
        queue: Any = SimpleNamespace(name="dead")
        task = await mover.start(queue, "", 0, 0, caller=Caller(session))
        await asyncio.sleep(2)
        assert task.status == "RUNNING"
        known.clear()
        await asyncio.sleep(2)
        assert (task.status, "deleted" in task.failure) == ("FAILED", True)
        mover.close()

    run_virtually(scenario())


def test_a_running_task_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_moves, "TASKS_MAX", 3)

    async def scenario() -> None:
        queues: Any = Queues()
        mover = MessageMover(queues)
        tasks = [await start(mover, name) for name in ("a", "b", "c")]
        with pytest.raises(UnsupportedOperation):
            await start(mover, "d")
        mover.cancel(tasks[1].handle, caller=ANONYMOUS)
        await start(mover, "d")
        assert [len(mover.list_tasks(mover_queue, 10)) for mover_queue in map(queues.find, "abcd")] == [
            1,
            0,
            1,
            1,
        ]
        mover.close()

    run_virtually(scenario())
