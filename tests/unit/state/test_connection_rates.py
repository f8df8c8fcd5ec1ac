"""Addresses create connections at their rate and no faster, whatever the order of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mansio.state.connection_rates import ConnectionRates
from mansio.state.quota import NonLiteralName

BURST_MS = 2_000


@given(
    rate=st.integers(1, 20),
    steps=st.lists(st.tuples(st.sampled_from((0.0, 0.01, 0.3, 2.0)), st.integers(0, 2)), max_size=150),
)
def test_each_address_creates_at_most_rate_times_time_and_a_burst(
    rate: int, steps: list[tuple[float, int]]
) -> None:
    rates = ConnectionRates(burst_ms=BURST_MS)
    rates.set_rates({NonLiteralName.DEFAULT: rate})
    now = 100.0
    allowed: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for seconds, address in steps:
        now += seconds
        throttle_ms = rates.take(f"192.0.2.{address}", now)
        assert 0 <= throttle_ms <= 1000 / rate + 1
        if not throttle_ms:
            allowed[address].append(now)
    for times in allowed.values():
        for first, begin in enumerate(times):
            for last in range(first, len(times)):
                most = rate * (times[last] - begin) + rate * BURST_MS / 1000 + 1
                assert last - first + 1 <= most + 1e-6


def test_throttled_connections_do_not_delay_the_next_one() -> None:
    rates = ConnectionRates(burst_ms=1000)
    rates.set_rates({"192.0.2.1": 1})
    while not (throttle_ms := rates.take("192.0.2.1", 0.0)):
        pass
    for _ in range(1000):
        assert rates.take("192.0.2.1", 0.0) == throttle_ms
    assert rates.take("192.0.2.1", throttle_ms / 1000) == 0


def allowed_at_once(rates: ConnectionRates, *hosts: str) -> int:
    """Number of connections that addresses create in turn before one is throttled."""
    count = 0
    while not rates.take(hosts[count % len(hosts)], 0.0):
        count += 1
    return count


def test_quota_of_an_address_counts_instead_of_the_default() -> None:
    rates = ConnectionRates(burst_ms=1000)
    rates.set_rates({NonLiteralName.DEFAULT: 2, "192.0.2.1": 8})
    assert allowed_at_once(rates, "192.0.2.1") == 9
    assert allowed_at_once(rates, "::ffff:192.0.2.2") == 3
    rates.set_rates({"192.0.2.3": 1})
    assert not any(rates.take("192.0.2.2", 0.0) for _ in range(100))


def test_addresses_of_one_ipv6_network_share_a_rate() -> None:
    rates = ConnectionRates(burst_ms=1000)
    rates.set_rates({NonLiteralName.DEFAULT: 100, "2001:db8::1": 9, "2001:db8::2": 4})
    assert allowed_at_once(rates, "2001:db8::7", "2001:db8::8:9") == 5
    assert allowed_at_once(rates, "2001:db8:0:1::7") == 101
