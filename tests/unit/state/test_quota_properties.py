"""Quotas hold for every pattern of requests, are charged to the right client, and use bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.state.quota import (
    THROTTLE_MS_MAX,
    NonLiteralName,
    QuotaEntity,
    QuotaScope,
    RateLimiter,
    TokenBucket,
    find_quota,
)

DEFAULT = NonLiteralName.DEFAULT
ABSENT = NonLiteralName.ABSENT
EVERYBODY = {QuotaEntity(client_id=DEFAULT): 100.0}

rates = st.floats(1, 1e9, allow_nan=False)
bursts = st.integers(0, 20_000)
requests = st.lists(st.tuples(st.integers(0, 10**7), st.floats(0, 30)), min_size=1, max_size=200)


@given(rate=rates, burst_ms=bursts, requests=requests)
def test_who_keeps_the_pauses_never_gets_more_than_rate_times_time_and_one_burst(
    rate: float, burst_ms: int, requests: list[tuple[int, float]]
) -> None:
    bucket = TokenBucket(rate, burst_ms, 0.0)
    now = 0.0
    ends: list[tuple[float, int]] = []  # (when the pause after it was over, bytes of a request)
    for size_bytes, idle_s in requests:
        now += idle_s
        pause_ms = bucket.take(size_bytes, now)
        if pause_ms == THROTTLE_MS_MAX:
            return  # what is left is owed on
        now += pause_ms / 1000
        ends.append((now, size_bytes))
    for first in range(len(ends)):
        begun = ends[first - 1][0] if first else 0.0
        taken = sum(size_bytes for _, size_bytes in ends[first:])
        assert taken <= (rate * (now - begun) + rate * burst_ms / 1000) * (1 + 1e-6) + 1


@given(
    rate=rates,
    burst_ms=st.integers(10, 20_000),
    worth_ms=st.lists(st.floats(0.1, 5000), min_size=1, max_size=50),
)
def test_who_always_has_something_gets_the_whole_rate_in_the_long_run(
    rate: float, burst_ms: int, worth_ms: list[float]
) -> None:
    bucket = TokenBucket(rate, burst_ms, 0.0)
    sizes = [max(round(rate * one / 1000), 1) for one in worth_ms]
    rounds = int(50 * rate * burst_ms / 1000 / sum(sizes)) + 50
    now = 0.0
    taken = 0
    for _ in range(min(rounds, 3000 // len(sizes))):
        for size_bytes in sizes:
            taken += size_bytes
            now += bucket.take(size_bytes, now) / 1000
    assert taken <= rate * now + bucket.capacity + 1
    assert taken >= rate * now * 0.97 - max(sizes) - rate / 1000  # pauses are whole milliseconds, rounded up


@given(
    clients=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3000), st.floats(0, 3)), max_size=300),
)
def test_forgetting_the_idle_changes_no_pause(clients: list[tuple[int, int, float]]) -> None:
    limiter = RateLimiter(burst_ms=2000)
    limiter.set_rates(EVERYBODY)
    kept = {number: TokenBucket(100.0, 2000, 0.0) for number in range(41)}
    now = 0.0
    for number, size_bytes, idle_s in clients:
        now += idle_s
        assert limiter.take("u", str(number), size_bytes, now) == pytest.approx(
            kept[number].take(size_bytes, now), abs=1
        )


@given(clients=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 10**6)), max_size=300))
def test_no_number_of_client_ids_takes_more_than_the_bound(clients: list[tuple[int, int]]) -> None:
    limiter = RateLimiter(burst_ms=2000, buckets_max=7)
    limiter.set_rates(EVERYBODY)
    for number, size_bytes in clients:
        limiter.take("u", str(number), size_bytes, 0.0)
        assert len(limiter) <= 7


def test_idle_clients_are_forgotten_as_others_come() -> None:
    limiter = RateLimiter(burst_ms=1000)
    limiter.set_rates(EVERYBODY)
    for number in range(1000):
        limiter.take("u", f"early {number}", 50, 0.0)
    assert len(limiter) == 1000
    for number in range(1000):
        limiter.take("u", f"late {number}", 50, 10.0)
    assert len(limiter) == 1000


def test_a_client_id_of_any_length_is_remembered_in_bounded_memory() -> None:
    limiter = RateLimiter(burst_ms=1000)
    limiter.set_rates(EVERYBODY)
    assert limiter.take("u", "x" * 30_000, 100, 0.0) == 0
    assert limiter.take("u", "x" * 255, 100, 0.0) == 1000


def test_the_most_special_quota_counts() -> None:
    order = [
        (QuotaEntity("u", "c"), QuotaScope("u", "c")),
        (QuotaEntity("u", DEFAULT), QuotaScope("u", "c")),
        (QuotaEntity("u", ABSENT), QuotaScope("u", None)),
        (QuotaEntity(DEFAULT, "c"), QuotaScope("u", "c")),
        (QuotaEntity(DEFAULT, DEFAULT), QuotaScope("u", "c")),
        (QuotaEntity(DEFAULT, ABSENT), QuotaScope("u", None)),
        (QuotaEntity(ABSENT, "c"), QuotaScope(None, "c")),
        (QuotaEntity(ABSENT, DEFAULT), QuotaScope(None, "c")),
    ]
    rates = {entity: float(number) for number, (entity, _) in enumerate(order, 1)}
    for entity, scope in order:
        assert find_quota(rates, "u", "c") == (scope, rates[entity])
        del rates[entity]
    assert find_quota(rates, "u", "c") is None
    assert (
        find_quota({QuotaEntity("other", ABSENT): 1.0, QuotaEntity(ABSENT, "other"): 1.0}, "u", "c") is None
    )


def test_another_rate_counts_at_once_and_a_debt_stays() -> None:
    limiter = RateLimiter(burst_ms=1000)
    limiter.set_rates({QuotaEntity(client_id="c"): 100.0})
    assert limiter.take("u", "c", 1100, 0.0) == 10_000
    limiter.set_rates({QuotaEntity(client_id="c"): 1000.0})
    assert limiter.take("u", "c", 0, 0.0) == 1000
    limiter.set_rates({})
    assert limiter.take("u", "c", 10**9, 0.0) == 0
    assert len(limiter) == 0
