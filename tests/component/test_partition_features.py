"""Features of partitions on a broker with real files: what deletion leaves open, and what enabling one changes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import mansio
from support.client_fixtures import broker_in
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SETTINGS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "delays": {"mansio.delay.enable": "true"},
    "deduplication": {"mansio.dedup.ms": "60000"},
    "priorities": {"mansio.priority.enable": "true"},
}
"""Settings of a topic by its feature."""


def open_files(directory: Path) -> set[str]:
    """The files below a directory that this process has open, also those that were removed."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:  # the descriptor of this listing
            continue
        if target.startswith(f"{directory}/"):
            found.add(target)
    return found


@pytest.fixture
def without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.usefixtures("without_collection")
@pytest.mark.parametrize("feature", SETTINGS)
def test_the_files_of_a_deleted_topic_are_closed_without_a_collection(feature: str, tmp_path: Path) -> None:
    with broker_in(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("t", partitions=2, config=SETTINGS[feature])
        for number in range(4):
            client.publish(
                "t",
                f"v{number}",
                partition=number % 2,
                delay=3_600.0 * (number // 2) if feature == "delays" else None,
                dedup_id=f"d{number % 3}" if feature == "deduplication" else None,
                priority="high" if feature == "priorities" else None,
            )
        topics = tmp_path / "topics"

        def of_topic() -> list[str]:
            return [each for each in open_files(topics) if f"{topics}/t." in each]

        assert of_topic()
        client.admin.delete_topic("t")
        wait_until(lambda: not of_topic())
