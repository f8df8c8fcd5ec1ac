"""A client cannot tell an unknown user from a wrong password by the time of any answer, over two thousand log-ins of
each kind.

The log-ins of both kinds alternate in random order, so that what else runs on the machine slows down both. The times
are compared by ranks (Mann and Whitney): the probability that an answer for an unknown user takes longer than one for a
wrong password is a half, however the times are distributed. `MANSIO_NIGHTLY_LOG_INS` sets another number.
"""

from __future__ import annotations

import bisect
import math
import os
import statistics
import time
from random import Random
from typing import TYPE_CHECKING

import pytest

from mansio.config.security import PLAIN
from mansio.state.authentication.credentials import ScramMechanism
from support.credentials import ScramPeer
from support.nightly_counts import leave
from support.raw_peer import RawPeer
from support.sasl_broker import sasl_broker, send_token, shake

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LOG_INS = int(os.environ.get("MANSIO_NIGHTLY_LOG_INS", "2000"))
DEVIATIONS_MAX = 5.0
"""Standard deviations by which the probability may differ from a half; one of a million right runs does by more."""

KNOWN, UNKNOWN = "alice", "mabel"
PASSWORD, WRONG = "correct horse", "wrong horse.."


def probability(first: Sequence[float], second: Sequence[float]) -> float:
    """Probability that a value of `second` is larger than one of `first`; equal ones count half."""
    ordered = sorted(first)
    larger = sum(bisect.bisect_left(ordered, each) + bisect.bisect_right(ordered, each) for each in second)
    return larger / (2 * len(first) * len(second))


def deviations(first: Sequence[float], second: Sequence[float]) -> float:
    """Standard deviations by which `probability` differs from a half."""
    n, m = len(first), len(second)
    return abs(probability(first, second) - 0.5) / math.sqrt((n + m + 1) / (12 * n * m))


def answer_times(port: int, mechanism: str, user: str) -> list[float]:
    """Seconds until each answer of a log-in with a wrong password."""
    with RawPeer(port) as peer:
        assert shake(peer, mechanism).error_code == 0
        if mechanism == PLAIN:
            began = time.perf_counter()
            assert send_token(peer, f"\0{user}\0{WRONG}".encode()).error_code
            return [time.perf_counter() - began]
        scram = ScramPeer(user, WRONG, ScramMechanism(mechanism))
        first = scram.first()
        began = time.perf_counter()
        challenge = send_token(peer, first)
        challenged = time.perf_counter() - began
        final = scram.final(challenge.auth_bytes)
        began = time.perf_counter()
        assert send_token(peer, final).error_code
        return [challenged, time.perf_counter() - began]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("mechanism", "log_ins", "delay_ms"),
    [
        *((each.value, LOG_INS, 0) for each in ScramMechanism),
        (PLAIN, max(LOG_INS // 10, 20), 200),  # wrong passwords of an address are limited to 10 a second
    ],
)
def test_unknown_user_and_wrong_password_take_equal_time(
    tmp_path: Path, mechanism: str, log_ins: int, delay_ms: int
) -> None:
    random = Random(17)
    times: dict[str, list[list[float]]] = {KNOWN: [], UNKNOWN: []}
    with sasl_broker(tmp_path / "data", connection_failed_authentication_delay_ms=delay_ms) as broker:
        broker.set_user(KNOWN, PASSWORD)
        for number in range(log_ins + 20):
            for user in random.sample((KNOWN, UNKNOWN), 2):
                taken = answer_times(broker.port, mechanism, user)
                if number >= 20:  # schemas are compiled, caches fill
                    times[user].append(taken)
    for answer in range(len(times[KNOWN][0])):
        known, unknown = ([each[answer] for each in times[user]] for user in (KNOWN, UNKNOWN))
        figures = {
            "known_us": statistics.median(known) * 1e6,
            "unknown_us": statistics.median(unknown) * 1e6,
            "probability": probability(known, unknown),
        }
        print(f"{mechanism}, answer {answer + 1}: {figures}")
        leave(f"log-ins with {mechanism}, answer {answer + 1}", log_ins=2 * log_ins, **figures)
        assert deviations(known, unknown) < DEVIATIONS_MAX, figures
