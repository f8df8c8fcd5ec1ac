"""Seeds of tests that choose at random what they do: another one each time, printed, and repeated when asked for."""

from __future__ import annotations

import os
import random


def chosen_seed() -> int:
    """What MANSIO_TEST_SEED says, otherwise one that does not depend on the seed of the run. Printed."""
    seed = int(os.environ.get("MANSIO_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"MANSIO_TEST_SEED={seed}")
    return seed
