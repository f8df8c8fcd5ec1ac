"""Delays between attempts grow up to their limit, however many attempts there are."""

from __future__ import annotations

from mansio.backoff import grown_delay


def test_delays_double_up_to_the_longest_one() -> None:
    assert [grown_delay(failures, 1_000, 60_000) for failures in range(8)] == [
        *(1_000, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000)
    ]
    assert grown_delay(1_000_000, 1_000, 60_000) == 60_000


def test_a_slow_growth_goes_on_and_no_delay_stays_none() -> None:
    assert grown_delay(41, 10, 60_000, 1.2) > grown_delay(31, 10, 60_000, 1.2) > 10
    assert grown_delay(1_000, 0, 60_000, 100.0) == 0
