"""Seeds of tests that choose at random what they do: fixed, except in the tier `nightly`, where each run has others."""

from __future__ import annotations

import os
import random

from support import tiers


def chosen_seed() -> int:
    """MANSIO_TEST_SEED, otherwise a random seed in `nightly` and the fixed one elsewhere. Printed."""
    given = os.environ.get("MANSIO_TEST_SEED")
    if given:
        seed = int(given)
    elif tiers.tier() == "nightly":
        seed = random.SystemRandom().randrange(1 << 32)
    else:
        seed = tiers.FIXED_SEED
    print(f"MANSIO_TEST_SEED={seed}")
    return seed
