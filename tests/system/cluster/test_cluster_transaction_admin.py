"""Administration of transactions in a cluster: any broker answers, and an open transaction never seems to hang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.cluster import cluster
from support.machine import scaled
from support.open_transactions import open_transaction
from support.waiting import wait_until
from system.cluster.load import create_topic

if TYPE_CHECKING:
    from pathlib import Path

PARTITIONS = 6
TOPIC = "orders"
SESSION_MS = 3_000


@pytest.mark.full
@pytest.mark.row("O3", "C4")
@pytest.mark.timeout(180)
def test_any_broker_administers_transactions_also_after_the_death_of_their_coordinator(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, http=True, broker_session_timeout_ms=SESSION_MS) as one:
        create_topic(one, TOPIC, PARTITIONS)
        ids = [f"orders-{index}" for index in range(PARTITIONS)]
        producers = [
            open_transaction(one.bootstrap_servers, each, TOPIC, ["a"], index, timeout_ms=900_000)
            for index, each in enumerate(ids)
        ]
        urls = {node: f"{broker.http_url}/v1" for node, broker in one.brokers.items()}
        with httpx.Client(timeout=scaled(60)) as http:

            def ok(response: httpx.Response) -> Any:
                assert response.status_code in (200, 204), response.text
                return response.json() if response.content else None

            for url in urls.values():
                listed = ok(http.get(f"{url}/transactions", params={"state": "Ongoing"}))
                assert listed["is_complete"]
                assert [each["transactional_id"] for each in listed["transactions"]] == ids
                for index, each in enumerate(ids):
                    found = ok(http.get(f"{url}/transactions/{each}"))
                    assert (found["state"], found["partitions"]) == (
                        "Ongoing",
                        [{"topic": TOPIC, "partition": index}],
                    )
                    path = f"{url}/topics/{TOPIC}/partitions/{index}"
                    (at,) = ok(http.get(f"{path}/producers"))["producers"]
                    assert (at["producer_id"], at["transaction_start_offset"]) == (found["producer_id"], 0)
                    refused = http.post(f"{path}/transactions/abort", json={"start_offset": 0})
                    assert (refused.status_code, refused.json()["title"]) == (409, "InvalidTxnState")
            away = next(url for node, url in urls.items() if node != one.leader(TOPIC, 0))
            forced = {"start_offset": 0, "force": True}
            ok(http.post(f"{away}/topics/{TOPIC}/partitions/0/transactions/abort", json=forced))

            coordinators = {ok(http.get(f"{away}/transactions/{each}"))["coordinator_id"] for each in ids}
            victim = min(coordinators)
            other = next(url for node, url in urls.items() if node != victim)
            one.kill(victim)

            def has_moved() -> bool:
                hanging = http.get(f"{other}/hanging-transactions", params={"open_ms_min": 0})
                assert hanging.status_code in (200, 503, 504), hanging.text
                if hanging.status_code != 200:
                    return False
                assert hanging.json()["transactions"] == []
                response = http.get(f"{other}/transactions", params={"state": "Ongoing"})
                return (
                    response.status_code == 200
                    and [each["transactional_id"] for each in response.json()["transactions"]] == ids
                )

            wait_until(has_moved, 60)
            marked = {"X-Mansio-Request": "1"}
            for each in ids[1:3]:
                ok(http.post(f"{other}/transactions/{each}/terminate", headers=marked))
            for producer in producers[3:]:
                producer.commit_transaction(scaled(60))

            def are_ended() -> bool:
                listed = ok(http.get(f"{other}/transactions"))["transactions"]
                states = {each["transactional_id"]: each["state"] for each in listed}
                return [states[each] for each in ids] == ["Ongoing", *["Empty"] * 2, *["CompleteCommit"] * 3]

            wait_until(are_ended, 60)
            one.start(victim)
