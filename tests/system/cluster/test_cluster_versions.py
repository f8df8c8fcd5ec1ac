"""A cluster of the last release in which one broker still runs it: the others serve what it leads."""

from __future__ import annotations

import sys
import zipfile
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

import mansio
from mansio.broker.services.share_groups.leases import Receipt
from support.cluster import cluster
from support.machine import scaled
from support.paths import ROOT
from support.waiting import wait_until
from system.cluster.load import create_topic

if TYPE_CHECKING:
    from pathlib import Path

WHEEL: Final = ROOT / "tests" / "fixtures" / "wheels" / "mansio-0.1.0-py3-none-any.whl"
OLD_BROKER: Final = 3
PARTITIONS: Final = 6
TOPIC: Final = "mixed"
GROUP: Final = "workers"


@pytest.mark.full
@pytest.mark.row("A3", "C4")
@pytest.mark.timeout(240)
def test_brokers_of_this_version_and_of_the_last_release_serve_each_others_partitions(tmp_path: Path) -> None:
    release = tmp_path / "release"
    zipfile.ZipFile(WHEEL).extractall(release)
    old = ["env", f"PYTHONPATH={release}", "PYTHONSAFEPATH=1", sys.executable, "-m", "mansio"]
    with cluster(tmp_path, http=True, commands={OLD_BROKER: old}, first=[OLD_BROKER]) as one:
        create_topic(one, TOPIC, PARTITIONS)
        assert {one.leader(TOPIC, index) for index in range(PARTITIONS)} == set(one.brokers)
        urls = [f"{broker.http_url}/v1" for node_id, broker in one.brokers.items() if node_id != OLD_BROKER]
        with httpx.Client(timeout=scaled(30)) as http:

            def ok(response: httpx.Response) -> Any:
                assert response.status_code in (200, 201, 204), response.text
                return response.json() if response.content else None

            # Publishing and reading over HTTP. (The last release has another API.)
            for number, url in enumerate(urls):
                records = [{"value": f"{number}-{index}", "partition": index} for index in range(PARTITIONS)]
                result = ok(http.post(f"{url}/topics/{TOPIC}/records/batch", json={"records": records}))
                assert result["failed"] == 0, result
            for url in urls:
                for index in range(PARTITIONS):
                    found = ok(http.get(f"{url}/topics/{TOPIC}/partitions/{index}/records"))["records"]
                    assert [each["value"] for each in found] == [f"{n}-{index}" for n in range(len(urls))]

            # Acknowledging over HTTP what the last release leads: it gets the request of the client itself.
            old_led = next(index for index in range(PARTITIONS) if one.leader(TOPIC, index) == OLD_BROKER)
            with mansio.blocking.connect(one.bootstrap_servers) as client:
                topic_id = client.admin.describe_topic(TOPIC).topic_id
            receipt = Receipt("00" * 16, topic_id, old_led, 0, 1).encode()
            for url in urls:
                answer = http.post(f"{url}/groups/{GROUP}/ack", json={"receipts": [receipt]})
                assert answer.status_code == 409, answer.text
                assert answer.json()["title"] == "InvalidRecordState"

        # A share group, whose leaders and coordinator are on all brokers.
        wanted = PARTITIONS * len(urls)
        acknowledged: Counter[bytes | None] = Counter()
        with mansio.blocking.connect(one.bootstrap_servers) as client:
            client.admin.alter_group_config(GROUP, {"share.auto.offset.reset": "earliest"})
            with client.receive(TOPIC, group=GROUP) as receiver:

                def receive() -> bool:
                    messages = receiver.poll(1_000)
                    receiver.ack(messages)
                    acknowledged.update(message.value for message in messages)
                    return acknowledged.total() >= wanted

                wait_until(receive, 90)
        assert set(acknowledged.values()) == {1}
