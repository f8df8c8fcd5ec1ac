"""Ctrl-C and SIGTERM for a pipeline that runs until it is told to end.

The first is noted, and who started Spark or follows its query ends that between two looks: an error raised in the
middle of a call to the JVM would leave that call's connection in an unknown state, and one raised while Spark starts
would leave a JVM behind that nobody ends. The second ends the process, whatever it is doing.

Always true: the exit code says which signal it was; what the JVM makes of a signal (a service manager sends SIGTERM to
all processes) is no error of ours once somebody wanted the end.
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
    """Spark's Java process has died: out of memory, or killed. The same command goes on where it ended."""


class StopSignals:
    """`stop_signals()` says whether somebody wants the end."""

    def __init__(self) -> None:
        self._received: signal.Signals | None = None

    def __call__(self) -> bool:
        return self._received is not None

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Around all that has to do with Spark: takes both signals, and turns one that came into its exit code."""
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
        """Take both signals; again after Spark has started, because its session takes SIGINT for itself."""
        for number in EXIT_CODES:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._received is not None:
            sys.exit(EXIT_CODES[signal.Signals(number)])
        self._received = signal.Signals(number)
        os.write(
            STANDARD_ERROR, b"mansio: ending in order; once more ends it at once\n"
        )  # print may be interrupted


def _has_java_died(error: BaseException | None) -> bool:
    """Whether it began with a call to Java that was not answered; what came after that says less."""
    while error is not None:
        if type(error).__name__ == "Py4JNetworkError":
            return True
        error = error.__context__
    return False
