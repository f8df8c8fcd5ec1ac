"""Ctrl-C and SIGTERM of a command that follows a query: the first is a wish, the second an order."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import typer
from py4j.protocol import Py4JNetworkError

from mansio.cli.support.signals import EXIT_CODES, JavaProcessDied, StopSignals

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in EXIT_CODES}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def as_spark_does(_number: int, _frame: object) -> None:
    """Its session takes SIGINT when it starts."""
    raise KeyboardInterrupt


def follow(*signals: int, error: BaseException | None = None, starting: int | None = None) -> bool:
    """Spark starts, then a query is followed while signals come, and may fail; whether its end was asked for."""
    stop_signals = StopSignals()
    with stop_signals.handling():
        if starting is not None:
            os.kill(os.getpid(), starting)
        signal.signal(signal.SIGINT, as_spark_does)
        stop_signals.install()
        for number in signals:
            os.kill(os.getpid(), number)
        if error is not None:
            raise error
    return stop_signals()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_first_signal_is_noted_whatever_spark_did_and_is_the_exit_code(
    number: int, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        follow(number)
    assert ended.value.exit_code == code
    with pytest.raises(typer.Exit) as ended:
        follow(starting=number)
    assert ended.value.exit_code == code
    assert capfd.readouterr().err == "mansio: stopping; press Ctrl-C again to stop immediately\n" * 2


def test_second_signal_ends_at_once() -> None:
    for starting, signals in ((signal.SIGTERM, (signal.SIGINT,)), (None, (signal.SIGTERM, signal.SIGINT))):
        with pytest.raises(SystemExit) as ended:
            follow(*signals, starting=starting)
        assert ended.value.code == 130


def test_error_is_shown_unless_the_end_was_wanted() -> None:
    assert not follow()
    with pytest.raises(RuntimeError, match="query ended"):
        follow(error=RuntimeError("the query ended"))
    with pytest.raises(typer.Exit):
        follow(signal.SIGTERM, error=RuntimeError("the JVM was terminated as well"))


def test_java_that_died_is_one_line_whatever_failed_after_it() -> None:
    error = ConnectionRefusedError()
    error.__context__ = Py4JNetworkError("Answer from Java side is empty")
    with pytest.raises(JavaProcessDied, match="Spark's Java process has ended"):
        follow(error=error)
