"""HTTP in a cluster: every broker publishes to, reads from and administers partitions that another one leads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import mansio
from support.cluster import cluster
from support.machine import scaled
from support.waiting import wait_until
from system.cluster.load import create_topic

if TYPE_CHECKING:
    from pathlib import Path

PARTITIONS = 6
TOPIC = "routed"


@pytest.mark.full
@pytest.mark.row("A3", "C4")
@pytest.mark.timeout(180)
def test_any_broker_publishes_to_and_reads_from_all_partitions(tmp_path: Path) -> None:
    with cluster(tmp_path, http=True) as one:
        create_topic(one, TOPIC, PARTITIONS, mansio_delay_enable="true")
        urls = [f"{broker.http_url}/v1" for broker in one.brokers.values()]
        with httpx.Client(timeout=scaled(30)) as http:

            def ok(response: httpx.Response) -> Any:
                assert response.status_code in (200, 201, 204), response.text
                return response.json() if response.content else None

            assert len({one.leader(TOPIC, index) for index in range(PARTITIONS)}) > 1
            for number, url in enumerate(urls):
                records = [
                    {"value": f"{number}-{index}", "partition": index, "headers": {"h": "x"}}
                    for index in range(PARTITIONS)
                ]
                result = ok(http.post(f"{url}/topics/{TOPIC}/records/batch", json={"records": records}))
                assert result["failed"] == 0, result
                assert [each["offset"] for each in result["records"]] == [number] * PARTITIONS
            wrong = {"records": [{"value": "x", "partition": PARTITIONS}, {"value": "x", "partition": 0}]}
            result = ok(http.post(f"{urls[0]}/topics/{TOPIC}/records/batch", json=wrong))
            assert result["failed"] == 1
            for url in urls:
                for index in range(PARTITIONS):
                    found = ok(http.get(f"{url}/topics/{TOPIC}/partitions/{index}/records"))["records"]
                    assert [each["value"] for each in found[: len(urls)]] == [
                        f"{number}-{index}" for number in range(len(urls))
                    ]
                    assert found[0]["headers"] == {"h": "x"}
            delayed = {
                "records": [{"value": "later", "partition": each, "delay_ms": 3_600_000} for each in range(6)]
            }
            assert ok(http.post(f"{urls[1]}/topics/{TOPIC}/records/batch", json=delayed))["failed"] == 0
            for url in urls:
                assert len(ok(http.get(f"{url}/topics/{TOPIC}/delayed"))["records"]) == PARTITIONS

            # The leader of a partition knows the client that has asked another broker.
            victim = one.leader(TOPIC, 0)
            other = next(url for node, url in zip(one.brokers, urls, strict=True) if node != victim)
            with mansio.blocking.connect(one.bootstrap_servers) as client:
                client.admin.quotas.set(client_id="slow", values={"consumer_byte_rate": 100})

            def throttled_fetches() -> float:
                families = text_string_to_metric_families(
                    http.get(f"{one.brokers[victim].http_url}/metrics").text
                )
                (family,) = (each for each in families if each.name == "mansio_throttled_requests")
                return next(each.value for each in family.samples if each.labels["api"] == "fetch")

            read = f"{other}/topics/{TOPIC}/partitions/0/records"
            ok(http.get(read, headers={"Mansio-Client-Id": "fast"}))
            assert throttled_fetches() == 0
            wait_until(
                lambda: ok(http.get(read, headers={"Mansio-Client-Id": "slow"})) and throttled_fetches(),
                60,
            )

            # After the leader of a partition died the others answer for it.
            one.kill(victim)

            def is_published() -> bool:
                response = http.post(f"{other}/topics/{TOPIC}/records?partition=0", json="after")
                assert response.status_code in (200, 503, 504), response.text
                return response.status_code == 200

            wait_until(is_published, 60)
            one.start(victim)
