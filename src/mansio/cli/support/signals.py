"""Ctrl-C and SIGTERM for a pipeline that runs until it is stopped.

The first signal is recorded, and polled by the code that starts Spark or follows its query: an exception during a call
to the JVM would leave its connection in an unknown state, and one during the start of Spark would leave a JVM running.
The second signal exits the process immediately.

Invariants:
* The exit code identifies the signal.
* After a signal, failures of the JVM are ignored (a service manager sends SIGTERM to all processes).
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from mansio.cli.support.common import INTERRUPTED_EXIT_CODE, TERMINATED_EXIT_CODE
from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Iterator

EXIT_CODES = {signal.SIGINT: INTERRUPTED_EXIT_CODE, signal.SIGTERM: TERMINATED_EXIT_CODE}
STANDARD_ERROR = 2


class JavaProcessDied(MansioError):
    """Spark's Java process has ended: out of memory, or killed. The same command resumes the pipeline."""


class StopSignals:
    """`stop_signals()` returns whether a signal was received."""

    def __init__(self) -> None:
        self._received: signal.Signals | None = None

    def __call__(self) -> bool:
        return self._received is not None

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Around all use of Spark: handles both signals, and converts a received one to its exit code."""
        self.install()
        try:
            yield
        except KeyboardInterrupt:  # from Spark's own handler
            self._received = self._received or signal.SIGINT
        except Exception as error:
            if self._received is None:
                if _has_java_died(error):
                    raise JavaProcessDied from error
                raise
        if self._received is not None:
            raise typer.Exit(EXIT_CODES[self._received])

    def install(self) -> None:
        """Install the handlers; called again after Spark has started, because its session installs one for SIGINT."""
        for number in EXIT_CODES:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._received is not None:
            sys.exit(EXIT_CODES[signal.Signals(number)])
        self._received = signal.Signals(number)
        os.write(
            STANDARD_ERROR, b"mansio: stopping; press Ctrl-C again to stop immediately\n"
        )  # print may be interrupted


def _has_java_died(error: BaseException | None) -> bool:
    """Whether the first error in the chain is an unanswered call to Java."""
    while error is not None:
        if type(error).__name__ == "Py4JNetworkError":
            return True
        error = error.__context__
    return False
