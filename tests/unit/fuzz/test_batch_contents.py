"""Readers of batches with a valid CRC and any content: typed outcomes, bounded memory, and nothing good is withheld."""

from __future__ import annotations

import tracemalloc
from random import Random
from typing import TYPE_CHECKING

import pytest

from mansio.wire.batch.compression import DECOMPRESSED_BYTES_MAX
from support.batch_contents import expanding_case
from support.seeds import chosen_seed
from support.tiers import examples
from unit.fuzz.batch_contents import check, log_of, read_as_arrow, read_as_consumer, read_as_share_member, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from unit.fuzz.batch_contents import Found

SLACK_BYTES = 32 << 20
"""For example the output of one piece of a gzip stream."""


def test_readers_step_over_any_batch_content_and_deliver_everything_else() -> None:
    run(Random(chosen_seed()), examples(200, 20_000, 20_000))


@pytest.mark.full
@pytest.mark.parametrize("reader", [read_as_consumer, read_as_share_member, read_as_arrow])
def test_memory_of_readers_is_at_most_twice_the_limit_of_decompressed_batches(
    reader: Callable[..., Found],
) -> None:
    random = Random(chosen_seed())
    more = (random,) if reader is read_as_share_member else ()
    for _ in range(2):
        # A member of a share group holds all records that one answer leases to it.
        cases = 1 if more else 2
        log = log_of([expanding_case(random, DECOMPRESSED_BYTES_MAX) for _ in range(cases)])
        tracemalloc.start()
        try:
            found = reader(log, *more)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        check(log, found, "share" if more else "consumer")
        assert peak_bytes <= 2 * DECOMPRESSED_BYTES_MAX + SLACK_BYTES
