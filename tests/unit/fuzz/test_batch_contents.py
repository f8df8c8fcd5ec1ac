"""Readers of batches with a valid CRC and any content: typed outcomes, bounded memory, and nothing good is withheld."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest

from mansio.wire.batch.compression import DECOMPRESSED_BYTES_MAX
from support.batch_contents import expanding_case
from support.seeds import chosen_seed
from support.tiers import examples
from unit.fuzz.batch_contents import check, log_of, read_as_arrow, read_as_consumer, read_as_share_member, run


def test_readers_step_over_any_batch_content_and_deliver_everything_else() -> None:
    run(Random(chosen_seed()), examples(200, 20_000, 20_000))


@pytest.mark.full
def test_memory_of_readers_is_at_most_twice_the_limit_of_decompressed_batches() -> None:
    random = Random(chosen_seed())
    for _ in range(4):
        log = log_of([expanding_case(random, DECOMPRESSED_BYTES_MAX) for _ in range(2)])
        for reader in ("consumer", "share", "arrow"):
            tracemalloc.start()
            try:
                if reader == "consumer":
                    check(log, read_as_consumer(log), reader)
                elif reader == "share":
                    read_as_share_member(log, random)
                else:
                    read_as_arrow(log)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            print(reader, [case.case.is_readable for case in log.cases], peak >> 20)
