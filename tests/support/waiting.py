"""Waiting for a condition, with a deadline instead of a sleep.

Always true: both ask at once, then again after pauses that grow to 50 ms, and once more at the deadline.
A condition that raises ends the wait; the caller decides what it tolerates. Deadlines are given for the reference
machine and multiplied by the machine factor. A condition is called without arguments; its type is `Callable[..., T]`
because a lambda in a loop has the loop's variables as defaults.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Any, TypeVar, overload

from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

DEADLINE_S = 30.0
FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05


def wait_until(condition: Callable[..., T | None], deadline_s: float = DEADLINE_S, what: str = "") -> T:
    """Call `condition` until it returns something true, and return that.

    Raises `AssertionError` naming `what` (or the condition) after `deadline_s` seconds of the reference machine.
    """
    deadline_s = scaled(deadline_s)
    end = time.monotonic() + deadline_s
    pause_s = FIRST_PAUSE_S
    while True:
        answer = condition()
        if answer:
            return answer
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise AssertionError(_too_late(condition, deadline_s, what, answer))
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)


@overload
async def eventually(
    condition: Callable[..., Coroutine[Any, Any, T | None]], deadline_s: float = DEADLINE_S, what: str = ""
) -> T: ...
@overload
async def eventually(
    condition: Callable[..., T | None], deadline_s: float = DEADLINE_S, what: str = ""
) -> T: ...
async def eventually(condition: Callable[..., Any], deadline_s: float = DEADLINE_S, what: str = "") -> Any:
    """`wait_until` for a test on a loop; the condition may be a coroutine function."""
    deadline_s = scaled(deadline_s)
    end = time.monotonic() + deadline_s
    pause_s = FIRST_PAUSE_S
    while True:
        answer: Any = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise AssertionError(_too_late(condition, deadline_s, what, answer))
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)


def _too_late(condition: Callable[..., object], deadline_s: float, what: str, answer: object) -> str:
    name = what or getattr(condition, "__qualname__", repr(condition))
    return f"not within {deadline_s:g} s: {name} (the last answer was {answer!r})"
