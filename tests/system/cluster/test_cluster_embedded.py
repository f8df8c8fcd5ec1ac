"""Embedded brokers (`mansio.Broker(directory, etcd=...)`) as members of a cluster, several of them in one program."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.broker.maintenance.data_check import check_data_directory
from mansio.broker.maintenance.data_dir_mode import CLUSTER_FILE_NAME
from mansio.errors import ConfigError
from mansio.host.disk import HostDisk
from support.etcd import one_etcd
from support.paths import free_port
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.client.admin.cluster import PartitionStatus


@pytest.mark.row("C6")
def test_three_in_one_program_keep_copies_hand_over_and_come_back_one_after_the_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listeners = {node_id: f"127.0.0.1:{free_port()}" for node_id in (1, 2, 3)}  # a client finds them again
    with one_etcd() as etcd, ExitStack() as stack, caplog.at_level(logging.WARNING):

        def broker(node_id: int) -> mansio.Broker:
            made = mansio.Broker(
                tmp_path / str(node_id),
                listeners=listeners[node_id],
                etcd_endpoints=etcd.url,
                node_id=node_id,
                default_replication_factor=3,
            )
            return stack.enter_context(made)

        brokers = {node_id: broker(node_id) for node_id in (1, 2, 3)}
        addresses = ",".join(one.address for one in brokers.values())
        with mansio.blocking.connect(addresses) as client:

            def partition() -> PartitionStatus:
                return client.admin.cluster.partitions(["t"])[0]

            client.admin.create_topic("t")
            for number in range(20):
                client.publish("t", b"%d" % number)
            assert sorted(partition().in_sync_replicas) == [1, 2, 3]
            count = 20
            for node_id in (1, 2, 3):
                brokers[node_id].close()
                client.publish("t", b"%d" % count)
                assert partition().leader != node_id
                brokers[node_id] = broker(node_id)
                client.publish("t", b"%d" % (count + 1))
                count += 2
                wait_until(lambda: len(partition().in_sync_replicas) == 3, 15, "all in sync")
        with mansio.blocking.connect(brokers[1].address) as client:
            found = [message.value for message in client.consume("t", group="g", max_records=count)]
        assert found == [b"%d" % number for number in range(count)]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "replica_fetch_failed" not in caplog.messages, (
        "a leader that does not know its role yet is nobody's business"
    )
    examined = check_data_directory(HostDisk(), str(tmp_path / "1"))
    assert [finding.what for finding in examined.findings] == [
        "the data directory of a cluster's broker; the metadata is in etcd"
    ]
    assert examined.is_clean, "metadata in etcd are no damage here"


def test_one_that_should_run_a_member_of_etcd_is_refused(tmp_path: Path) -> None:
    broker = mansio.Broker(tmp_path, etcd_join="127.0.0.1")
    with pytest.raises(ConfigError, match="etcd_join: an embedded broker runs no etcd member"):
        broker.start()


def test_a_directory_of_a_single_broker_and_one_of_a_cluster_are_not_taken_for_each_other(
    tmp_path: Path,
) -> None:
    """With `etcd` forgotten for once a broker would come up without its topics, and clients would make them again."""
    with mansio.Broker(tmp_path / "single"):
        pass
    with pytest.raises(ConfigError, match="contains the topics of a single-node broker"):
        mansio.Broker(tmp_path / "single", etcd_endpoints="http://127.0.0.1:1").start()
    (tmp_path / "clustered").mkdir()
    (tmp_path / "clustered" / CLUSTER_FILE_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="start the broker with --etcd or --join"):
        mansio.Broker(tmp_path / "clustered").start()
    assert [path.name for path in (tmp_path / "clustered").iterdir() if path.name != "lock"] == [
        CLUSTER_FILE_NAME
    ]
