"""Ctrl-C and SIGTERM for a pipeline that runs until it is stopped.

The first signal is only recorded. The code that starts Spark and waits for the query polls for it. The handler raises
no exception: during a call to the JVM this would leave the connection in an unknown state, and during the start of
Spark it would leave a JVM running. The second signal exits the process immediately.

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
STDERR_DESCRIPTOR = 2


class JavaProcessDied(MansioError):
    """Spark's Java process has ended: out of memory, or killed. The same command resumes the pipeline."""


class StopSignals:
    """Handlers of SIGINT and SIGTERM. Calling the object returns whether a signal was received."""

    def __init__(self) -> None:
        self._received: signal.Signals | None = None

    def __call__(self) -> bool:
        return self._received is not None

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Context manager for all use of Spark: handles both signals, and exits with the code of a received signal.
        Raises `JavaProcessDied` if Spark's JVM has ended.
        """
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
        """Install the handlers. Call it again after the start of Spark, whose session installs a handler for SIGINT."""
        for number in EXIT_CODES:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._received is not None:
            sys.exit(EXIT_CODES[signal.Signals(number)])
        self._received = signal.Signals(number)
        os.write(
            STDERR_DESCRIPTOR, b"mansio: stopping; press Ctrl-C again to stop immediately\n"
        )  # print may be interrupted


def _has_java_died(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, is a lost connection to Spark's JVM."""
    while error is not None:
        if type(error).__name__ == "Py4JNetworkError":
            return True
        error = error.__context__
    return False
