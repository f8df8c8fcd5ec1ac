"""Start of an archive: at the offsets of the table, or an error. Without a Spark session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.errors import ConfigError, DataLoss
from mansio.iceberg.archive.table_format import LostRange
from mansio.iceberg.errors import NotAnArchiveTable
from mansio.pipelines import archive as archives
from mansio.pipelines.archive import ArchiveJob
from mansio.wire.internal_records.hold_metadata import pipeline_group_id
from support.archive_tables import Archive
from system.spark.topics import create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.process import ServedBroker


def test_first_records_of_an_added_partition_that_are_gone_are_an_error(
    broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    """The table never knew them, and it was there before they were."""
    topic = create(broker_process.bootstrap_servers, topic_name("in"))
    table = Archive(tmp_path, topic)
    table.add(table.open(), {0: 0})
    with mansio.blocking.connect(broker_process.bootstrap_servers) as client:
        client.admin.create_partitions(topic, 2)
    publish(broker_process.bootstrap_servers, topic, [(None, b"%d" % n) for n in range(9)], partition=1)

    def start(*, accept_loss: bool = False) -> dict[int, int]:
        job = ArchiveJob(topic, str(tmp_path), broker_process.bootstrap_servers, "p", accept_loss=accept_loss)
        return archives._ArchiveRun(None, job, lambda _progress: None, lambda: False)._start_offsets()  # type: ignore[arg-type]

    assert start() == {0: 0, 1: 0}
    with mansio.blocking.connect(broker_process.bootstrap_servers) as client:
        client.admin.delete_records([mansio.TopicPartition(topic, 1)], before=4)
    with pytest.raises(DataLoss, match="records 0 to 3 of partition 1"):
        start()
    assert start(accept_loss=True) == {0: 0, 1: 4}
    assert table.open().lost_ranges() == (LostRange(1, 0, 4),)


def test_archive_into_another_table_is_refused_the_name_until_it_is_released(
    broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    """They would share their offsets, which hold back deletion: the slower one would lose records."""
    topic = create(broker_process.bootstrap_servers, topic_name("in"))
    one, other = (
        archives._ArchiveRun(
            None,  # type: ignore[arg-type]
            ArchiveJob(topic, str(tmp_path / place), broker_process.bootstrap_servers, f"archive-{topic}"),
            lambda _progress: None,
            lambda: False,
        )
        for place in ("one", "other")
    )
    for _ in range(2):
        one._check_pipeline_name({0: 0})
        one._publish({0: 0})
    with pytest.raises(ConfigError, match=rf"--name.*mansio pipeline release archive-{topic}"):
        other._check_pipeline_name({0: 0})
    with mansio.blocking.connect(broker_process.bootstrap_servers) as client:
        client.admin.delete_group(pipeline_group_id(f"archive-{topic}"))
    other._check_pipeline_name({0: 0})


def test_topic_that_was_made_again_does_not_go_into_the_old_table(
    broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create(broker_process.bootstrap_servers, topic_name("in"))
    job = ArchiveJob(topic, str(tmp_path), broker_process.bootstrap_servers, "p")
    archives._ArchiveRun(None, job, lambda _progress: None, lambda: False)  # type: ignore[arg-type]
    with mansio.blocking.connect(broker_process.bootstrap_servers) as client:
        client.admin.delete_topic(topic)
    create(broker_process.bootstrap_servers, topic)
    with pytest.raises(NotAnArchiveTable, match="earlier topic"):
        archives._ArchiveRun(None, job, lambda _progress: None, lambda: False)  # type: ignore[arg-type]


def test_what_a_topic_had_deleted_before_its_archive_was_begun_is_no_loss(
    broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create(broker_process.bootstrap_servers, topic_name("in"))
    publish(broker_process.bootstrap_servers, topic, [(None, b"%d" % n) for n in range(9)])
    with mansio.blocking.connect(broker_process.bootstrap_servers) as client:
        client.admin.delete_records([mansio.TopicPartition(topic, 0)], before=4)
    job = ArchiveJob(topic, str(tmp_path), broker_process.bootstrap_servers, "p")
    run = archives._ArchiveRun(None, job, lambda _progress: None, lambda: False)  # type: ignore[arg-type]
    assert run._start_offsets() == {0: 4}
