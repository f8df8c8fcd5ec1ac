"""Hot partitions of a real cluster of three: what is hot is named although each broker leads only a part of the topic,
and its leader moves to where there is room."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from mansio import MansioError, OutgoingRecord, blocking
from mansio.tracebacks import without_traceback
from support.cluster import cluster
from system.cluster.load import create_topic
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.cluster import Cluster

PARTITIONS: Final = 6
WINDOW_MS: Final = 500
KEY: Final = b"customer 7"
DEADLINE_S: Final = 60.0


@contextmanager
def load(one: Cluster, hot: int) -> Iterator[None]:
    """Publish until the end of the context: most records of `orders` to one partition, of `even` as many to each, and
    still more to the only partition of `base`."""
    stopped = threading.Event()
    failures: list[MansioError] = []

    def records(partition: int, count: int) -> list[OutgoingRecord]:
        keys = (KEY if number % 10 else b"%d" % number for number in range(count))
        return [OutgoingRecord(b"v" * 100, key=key, partition=partition) for key in keys]

    def publish() -> None:
        try:
            with blocking.connect(one.bootstrap_servers) as client:
                while not stopped.is_set():
                    for _ in range(3):
                        client.publish_many("base", records(0, 50))
                    client.publish_many("orders", records(hot, 50))
                    client.publish_many(
                        "orders", [each for index in range(PARTITIONS) for each in records(index, 1)]
                    )
                    client.publish_many("even", [each for index in range(3) for each in records(index, 50)])
        except MansioError as error:
            failures.append(without_traceback(error))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
    assert not failures


def hot_of(shell: Shell, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = shell.json("cluster", "hot", *arguments)
    return found


@pytest.mark.full
@pytest.mark.row("T6")
@pytest.mark.timeout(300)
def test_a_hot_partition_of_a_cluster_is_named_and_its_leader_moves_to_where_there_is_room(
    tmp_path: Path,
) -> None:
    with cluster(
        tmp_path,
        brokers=3,
        hot_partition_window_ms=WINDOW_MS,
        hot_partition_records_per_second_min=20,
    ) as one:
        create_topic(one, "base", 1, copies=1)
        create_topic(one, "orders", PARTITIONS)
        create_topic(one, "even", 3)
        source = one.leader("base")
        hot = next(place.index for place in one.places("orders") if place.leader == source)
        assert len({place.leader for place in one.places("even")}) == 3, "each broker leads one partition"
        shell = Shell(one.bootstrap_servers)
        with load(one, hot):

            def named() -> Any:
                found = hot_of(shell)["partitions"]
                return next((each for each in found if each["sampled_records"] >= 100), None)

            found = one.wait(named, "the hot partition is named with its key", DEADLINE_S)
            assert (found["topic"], found["partition"], found["leader"]) == ("orders", hot, source)
            assert found["keys"][0]["key"] == KEY.decode()
            assert found["factor"] >= 3

            # `even` looks like one partition with all records to each broker, which asks the others.
            loads = {each["node_id"]: each for each in hot_of(shell)["brokers"]}
            assert len(loads) == 3
            assert {each["topic"] for each in hot_of(shell)["partitions"]} == {"orders"}

            moved: dict[str, Any] = {}

            def has_moved() -> bool:
                loads = {each["node_id"]: each["busy"] for each in hot_of(shell)["brokers"]}
                others = max(busy for node_id, busy in loads.items() if node_id != source)
                full_at = max(1, round(100 * (loads[source] + others) / 2))
                assert hot_of(shell, "--full-at", str(full_at), "--apply", "--yes")["executed"] == [], (
                    "within the cool-down"
                )
                done = hot_of(shell, "--full-at", str(full_at), "--cool-down", "0s", "--apply", "--yes")
                for each in done["executed"]:
                    moved.update(each)
                    (partition,) = done["partitions"]
                    moved["remedy"] = next(r for r in partition["remedies"] if r["move"])
                return bool(moved)

            one.wait(has_moved, "the leader is moved", DEADLINE_S)
            assert moved["error"] is None
            target = moved["target"]
            assert (moved["remedy"]["kind"], moved["remedy"]["move"]["target"]) == ("move-leader", target)
            assert moved["remedy"]["move"]["gain"] >= 0.1
            assert one.leader("orders", hot) == target != source
            assert one.place("orders", hot).replicas[0] == target, "it stays the preferred leader"

            def has_followed() -> bool:
                now = hot_of(shell)
                at = [each["leader"] for each in now["partitions"] if each["partition"] == hot]
                return at == [target]

            one.wait(has_followed, "the load has followed the leader", DEADLINE_S)
        one.check_logs()
