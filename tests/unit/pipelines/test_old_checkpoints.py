"""Checkpoints that earlier versions of Mansio have written, with each supported version of Spark: still understood.

`tests/golden/spark_checkpoints` is never written again. A query must continue where it ended, whatever changes.
"""

from __future__ import annotations

import json

import pytest

from mansio.pipelines.checkpoint import (
    CheckpointBinding,
    CheckpointMismatch,
    bind_checkpoint,
    completed_batch,
)
from mansio.pipelines.progress_listener import offsets_in
from mansio.spark.source.offsets import FIRST_BATCH_START, offsets_from_json, offsets_to_json
from mansio.spark.spark_versions import SUPPORTED_VERSIONS
from mansio.wire.topic_partition import TopicPartition
from support.paths import ROOT

CHECKPOINTS = ROOT / "tests" / "golden" / "spark_checkpoints"
VERSIONS = [f"{major}.{minor}" for major, minor in SUPPORTED_VERSIONS]
ENDS = [2, 4, 5, 6]
"""End offset of both partitions, by batch."""
PARTITIONS = [TopicPartition("orders", 0), TopicPartition("orders", 1)]


class Directory:
    """A checkpoint of the golden files, read only."""

    def __init__(self, name: str) -> None:
        self.location = name
        self._path = CHECKPOINTS / name

    def has_entries(self) -> bool:
        return True

    def names(self, directory: str) -> list[str]:
        return [path.name for path in (self._path / directory).iterdir()]

    def read(self, name: str) -> str | None:
        path = self._path / name
        return path.read_text() if path.exists() else None

    def write(self, name: str, text: str) -> None:
        raise AssertionError(f"{name} is written")

    def replace(self, name: str, text: str) -> None:
        self.write(name, text)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("batch", range(len(ENDS)))
def test_offsets_of_an_old_checkpoint_are_read_and_have_the_same_text(version: str, batch: int) -> None:
    text = (CHECKPOINTS / version / "offsets" / str(batch)).read_text().splitlines()[2]
    offsets = json.loads(text)
    assert offsets_from_json(offsets) == dict.fromkeys(PARTITIONS, ENDS[batch])
    assert offsets_in(text) == offsets_from_json(offsets)
    # Spark compares texts: an equal offset with another text would be a batch without records.
    again = offsets_to_json(offsets_from_json(offsets))
    if batch == 0:
        assert offsets[FIRST_BATCH_START] == {"orders": {"0": 0, "1": 0}}
        again = {**again, FIRST_BATCH_START: offsets[FIRST_BATCH_START]}
    assert json.dumps(again) == text


@pytest.mark.parametrize("version", VERSIONS)
def test_completed_batch_of_an_old_checkpoint_is_found(version: str) -> None:
    found = completed_batch(Directory(version))
    assert found is not None
    assert (found.batch, found.sources) == (2, ('{"orders": {"0": 5, "1": 5}}',))
    assert found.query


def test_binding_of_an_old_checkpoint_is_read_and_compared() -> None:
    topics = {"flights": "5f0c1b7d9e2a4c6890abcdef01234567"}
    bind_checkpoint(Directory("."), CheckpointBinding("late", topics, "topic late-flights"))
    with pytest.raises(CheckpointMismatch, match="is of writing topic late-flights, not topic other"):
        bind_checkpoint(Directory("."), CheckpointBinding("late", topics, "topic other"))
