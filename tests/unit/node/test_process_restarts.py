"""`RestartPolicy`: which brokers are restarted, and how often."""

from __future__ import annotations

import logging
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.logs import JsonFormatter, TextFormatter, fields
from mansio.node.processes.broker_process import LOG_FAILED_PATTERN
from mansio.node.processes.restarts import (
    FORCED_EXIT_CODE,
    RESTART_DELAY_MS_MAX,
    RESTART_WINDOW_S,
    RESTARTS_MAX,
    RestartAfter,
    RestartPolicy,
    StayDown,
)


@given(st.lists(st.floats(0, 30), max_size=60))
def test_no_window_has_more_restarts_than_allowed(pauses_s: list[float]) -> None:
    policy = RestartPolicy()
    now_s = 0.0
    restarts_s: list[float] = []
    for pause_s in pauses_s:
        now_s += pause_s
        decision = policy.on_exit(1, log_failed=False, now_s=now_s)
        if isinstance(decision, StayDown):
            assert len([when for when in restarts_s if when > now_s - RESTART_WINDOW_S]) == RESTARTS_MAX
            break
        assert decision.delay_s <= RESTART_DELAY_MS_MAX / 1000
        now_s += decision.delay_s
        restarts_s.append(now_s)
    for begin in restarts_s:
        assert len([when for when in restarts_s if begin <= when < begin + RESTART_WINDOW_S]) <= RESTARTS_MAX


def test_delay_doubles_with_each_restart_and_starts_again_after_a_quiet_minute() -> None:
    policy = RestartPolicy()
    assert policy.on_exit(1, log_failed=False, now_s=0) == RestartAfter(0.5)
    assert policy.on_exit(-signal.SIGKILL, log_failed=False, now_s=1) == RestartAfter(1.0)
    assert policy.on_exit(-signal.SIGSEGV, log_failed=False, now_s=3) == RestartAfter(2.0)
    assert policy.on_exit(1, log_failed=False, now_s=3 + 2 + RESTART_WINDOW_S) == RestartAfter(0.5)


@pytest.mark.parametrize("code", [0, FORCED_EXIT_CODE, -signal.SIGTERM, -signal.SIGINT])
def test_broker_that_was_stopped_stays_down(code: int) -> None:
    assert RestartPolicy().on_exit(code, log_failed=False, now_s=0) == StayDown("it was stopped")


@pytest.mark.parametrize("code", [0, FORCED_EXIT_CODE, -signal.SIGTERM])
def test_broker_that_was_stopped_is_restarted_where_the_policy_has_it(code: int) -> None:
    policy = RestartPolicy(restarts_max=None, restarts_stopped=True)
    assert policy.on_exit(code, log_failed=False, now_s=0) == RestartAfter(0.5)
    assert isinstance(policy.on_exit(code, log_failed=True, now_s=1), StayDown)


def test_broker_whose_log_failed_stays_down() -> None:
    decision = RestartPolicy().on_exit(-signal.SIGKILL, log_failed=True, now_s=0)
    assert isinstance(decision, StayDown)
    assert "flush of a log failed" in decision.reason


def test_no_broker_is_restarted_when_restarts_are_off() -> None:
    assert RestartPolicy(enabled=False).on_exit(1, log_failed=False, now_s=0) == StayDown("--no-restart")


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_failed_log_is_recognised_in_both_formats_of_log_lines(formatter: logging.Formatter) -> None:
    record = logging.makeLogRecord(
        {"name": "mansio.storage.log", "msg": "log_failed", "levelno": logging.ERROR, "levelname": "ERROR"}
    )
    for name, value in fields(directory="d").items():
        setattr(record, name, value)
    line = formatter.format(record).encode()
    assert LOG_FAILED_PATTERN.search(line), line
