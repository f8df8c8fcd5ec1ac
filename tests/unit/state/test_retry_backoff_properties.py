"""Backoff of a released record: bounded, never decreasing, and a delay that the consumer requests has precedence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mansio.state.share_partition.types import REQUESTED_DELAY_MS_MAX, Backoff

POLICIES = st.builds(
    Backoff,
    base_ms=st.integers(0, 3_600_000),
    multiplier=st.floats(1, 100),
    max_ms=st.integers(0, 86_400_000),
    jitter=st.floats(0, 1),
)
CHANCES = st.floats(0, 1, exclude_max=True)


@given(policy=POLICIES, attempts=st.integers(0, 40_000), random_fraction=CHANCES)
def test_rest_is_within_its_bounds(policy: Backoff, attempts: int, random_fraction: float) -> None:
    assert 0 <= policy.delay_ms(attempts, random_fraction) <= policy.max_ms


@given(policy=POLICIES, attempts=st.integers(1, 32_767))
def test_without_chance_a_rest_never_shrinks(policy: Backoff, attempts: int) -> None:
    steady = policy._replace(jitter=0.0)
    assert steady.delay_ms(attempts, 0.9) <= steady.delay_ms(attempts + 1, 0.1)
    assert steady.delay_ms(1, 0.5) == min(policy.base_ms, policy.max_ms)


@given(policy=POLICIES, attempts=st.integers(1, 100), random_fraction=CHANCES, asked=st.integers(0, 2**62))
def test_what_is_asked_for_wins_up_to_a_year(
    policy: Backoff, attempts: int, random_fraction: float, asked: int
) -> None:
    assert policy.delay_ms(attempts, random_fraction, asked) == min(asked, REQUESTED_DELAY_MS_MAX)


def test_default_policy_by_hand() -> None:
    policy = Backoff(1_000, 2.0, 60_000, 0.1)
    assert [policy.delay_ms(attempts, 0.5) for attempts in (1, 2, 3, 6, 7, 8)] == [
        1_000,
        2_000,
        4_000,
        32_000,
        60_000,
        60_000,
    ]
    assert policy.delay_ms(2, 0.0) == 1_800
    assert policy.delay_ms(2, 0.999_999) == 2_200
