"""Random damage to stored segments: MANSIO_NIGHTLY_DAMAGES cases, 20,000 by default, a third of them on replicas."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from support.nightly_counts import leave
from system.cluster import test_cluster_damage as replicas
from system.interop import test_damage_at_random as single

if TYPE_CHECKING:
    from pathlib import Path

DAMAGES = int(os.environ.get("MANSIO_NIGHTLY_DAMAGES", "20000"))
SINGLE_ROUNDS = -(-DAMAGES * 2 // (3 * single.FULL))
CLUSTER_ROUNDS = -(-DAMAGES // (3 * replicas.DAMAGES))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(SINGLE_ROUNDS))
def test_thousands_of_damages_reach_no_client_and_what_is_intact_is_read(tmp_path: Path, number: int) -> None:
    errors = single.run_rounds(
        tmp_path / str(number),
        damages=single.FULL,
        partitions=single.PARTITIONS,
        records=single.RECORDS,
    )
    leave("damage", damages=single.FULL, errors=errors)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(CLUSTER_ROUNDS))
def test_thousands_of_damages_of_replicas_are_repaired(tmp_path: Path, number: int) -> None:
    repaired = replicas.run_round(tmp_path / str(number), damages=replicas.DAMAGES)
    leave("damaged replicas", damages=replicas.DAMAGES, repaired=repaired)
