"""Exceptions as values: stored without their traceback, and raised as copies.

A traceback refers to the frames that the exception passed through, and a frame to its locals. An exception that is
stored where such a frame can reach it forms a cycle: it holds everything that the frames refer to, a refused batch for
example, until the cyclic garbage collector runs. A broker runs it rarely.

Invariants, which `tools/structure.py` checks:
* A promise that a local of the awaiting function refers to is awaited by `result_of` if it may get an exception.
* An exception that is stored (in an attribute, a result, a container or a promise) has no traceback.
* An exception that a local or an attribute refers to is not raised itself, but a copy of it. Otherwise each raise would
  add a traceback to the stored one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    T = TypeVar("T")
    E = TypeVar("E", bound=BaseException)
    OptionalError = TypeVar("OptionalError", bound=BaseException | None)


def without_traceback(error: OptionalError) -> OptionalError:
    """`error` itself, after its traceback and those of its causes and contexts were removed. None: None."""
    if error is None:
        return error
    chain: list[BaseException] = [error]
    for one in chain:  # grows meanwhile
        one.__traceback__ = None
        chain += [
            linked
            for linked in (one.__cause__, one.__context__)
            if linked is not None and linked not in chain
        ]
    return error


def copied(error: E) -> E:
    """Return a stored exception, to be raised: of a `MansioError` a copy with the same class, message, attributes and
    cause; any other one itself, because its constructor may do anything. Without traceback."""
    if not isinstance(error, MansioError):
        return without_traceback(error)
    # Constructors may take other arguments.
    made = cast("E", type(error).__new__(type(error), *error.args))
    made.__dict__.update(error.__dict__)
    made.__cause__ = error.__cause__
    made.__suppress_context__ = error.__suppress_context__
    return made


async def result_of(promise: Awaitable[T]) -> T:
    """Await a promise. A `MansioError` is raised as a copy, so that the promise and its waiter form no cycle; any other
    exception is a defect, and keeps its traceback."""
    try:
        return await promise
    except MansioError as error:
        raise copied(error) from error.__cause__
    finally:
        del promise
