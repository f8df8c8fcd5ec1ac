"""A million batches with a valid CRC and any content, read by every decoder, and thousands read over every protocol."""

from __future__ import annotations

import os
from random import Random

import pytest

from support.nightly_counts import leave
from support.seeds import chosen_seed
from unit.fuzz.batch_contents import run

CASES = int(os.environ.get("MANSIO_NIGHTLY_BATCH_CONTENTS", "1_000_000"))


@pytest.mark.timeout(4 * 3600)
def test_readers_step_over_any_batch_content_and_deliver_everything_else() -> None:
    run(Random(chosen_seed()), CASES)
    leave("fuzz of batch contents", cases=CASES)
