"""What a failed call of the user's function means for its row: the error, and whether the record is retried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RETRY: Final = "retry"
REJECT: Final = "reject"
ACTIONS: Final = (RETRY, REJECT)

GROUP_BACKOFF_MS: Final = -1
"""Delay of a retry by the backoff of the share group."""

MESSAGE_CHARACTERS_MAX: Final = 1_000
"""Maximum length of the message of an error; longer ones are truncated."""


class ProcessDied(Exception):
    """The call of a row has ended its process; `on_error` gets it, and it is the kind of the error."""


class TimedOut(ProcessDied):
    """The call of a row took longer than `timeout_ms`."""


class Reject(Exception):
    """Raised by a user's function for a row that no retry helps: its record becomes a dead letter with this reason."""


class Retry(Exception):
    """Raised by a user's function for a row that may succeed later. `delay_ms`: time until it is delivered again, -1
    for the backoff of the share group."""

    def __init__(self, reason: str = "", *, delay_ms: int = GROUP_BACKOFF_MS) -> None:
        super().__init__(reason)
        self.delay_ms: int = delay_ms

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_retry, (str(self), self.delay_ms)


def _new_retry(reason: str, delay_ms: int) -> Retry:
    return Retry(reason, delay_ms=delay_ms)


class RowErrors(Exception):
    """Raised by a user's function for several rows, some of which fail. `errors`: the exception of each of these, by
    its index in the call; `results`: what the function would return, with any values for these rows."""

    def __init__(self, errors: Mapping[int, BaseException], results: Any) -> None:
        super().__init__(f"{len(errors)} rows failed")
        self.errors: dict[int, BaseException] = dict(errors)
        self.results: Any = results


class RowError(NamedTuple):
    """Error of one row. `kind`: name of the exception, or `ProcessDied` or `TimedOut`; `action`: `retry` or `reject`;
    `delay_ms`: delay of the retry, -1 for the backoff of the share group."""

    kind: str
    message: str
    action: str
    delay_ms: int = GROUP_BACKOFF_MS


def row_error(error: BaseException, on_error: str | Callable[[BaseException], str | int]) -> RowError:
    """Return the error of a row whose call has raised an exception.

    `on_error`: `retry`, `reject`, or a function that returns one of them, or the delay of a retry in ms, for an
    exception. `Reject` and `Retry` decide themselves. If the function itself fails, the row is retried."""
    message = _message_of(error)
    if isinstance(error, Reject):
        return RowError("Reject", message, REJECT)
    if isinstance(error, Retry):
        return RowError("Retry", message, RETRY, max(error.delay_ms, GROUP_BACKOFF_MS))
    kind = type(error).__name__
    if isinstance(on_error, str):
        return RowError(kind, message, on_error)
    try:
        decision = on_error(error)
    except Exception as second:  # noqa: BLE001  # the user's
        return RowError(kind, f"{message} (on_error: {_message_of(second)})"[:MESSAGE_CHARACTERS_MAX], RETRY)
    if isinstance(decision, int):
        return RowError(kind, message, RETRY, max(decision, GROUP_BACKOFF_MS))
    return RowError(kind, message, decision if decision in ACTIONS else RETRY)


def _message_of(error: BaseException) -> str:
    """Return the message of an exception of the user's, as text that can be stored."""
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001  # the user's
        text = f"(no message: {type(second).__name__})"
    return text[:MESSAGE_CHARACTERS_MAX].encode("utf-8", "replace").decode()
