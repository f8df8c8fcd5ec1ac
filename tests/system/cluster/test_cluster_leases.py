"""Leases over HTTP and SQS in a cluster: every broker serves the partitions of all leaders."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.cluster import cluster
from support.machine import scaled
from support.sqs import sqs_client
from support.waiting import wait_until
from system.cluster.load import create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.cluster import Cluster

PARTITIONS = 6
TOPIC = "routed"


@pytest.fixture(scope="module")
def three_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(
        tmp_path_factory.mktemp("leases"), http=True, sqs=True, broker_session_timeout_ms=10_000
    ) as one:
        yield one


class Group:
    """A share group of one topic over the HTTP listeners of all brokers."""

    def __init__(self, one: Cluster, http: httpx.Client, topic: str) -> None:
        self.http = http
        self.topic = topic
        self.urls = {node_id: f"{broker.http_url}/v1" for node_id, broker in one.brokers.items()}
        url = self.urls[1]
        config = {"config": {"share.auto.offset.reset": "earliest"}}
        ok(http.patch(f"{url}/groups/{topic}/config", json=config))

    def publish(self, count: int, partitions: int = PARTITIONS) -> None:
        records = [
            {"value": f"{index}-{number}", "partition": index}
            for number in range(count)
            for index in range(partitions)
        ]
        result = ok(
            self.http.post(f"{self.urls[1]}/topics/{self.topic}/records/batch", json={"records": records})
        )
        assert result["failed"] == 0, result

    def receive(self, node_id: int, max_records: int, wait_ms: int = 0) -> list[dict[str, Any]]:
        response = self.http.post(
            f"{self.urls[node_id]}/groups/{self.topic}/receive",
            json={
                "topics": [self.topic],
                "max_records": max_records,
                "wait_ms": wait_ms,
                "lease_ms": 3_600_000,
            },
        )
        found: list[dict[str, Any]] = ok(response)["records"]
        return found

    def ack(self, node_id: int, receipts: list[str]) -> dict[str, Any]:
        body = {"receipts": receipts}
        result: dict[str, Any] = ok(
            self.http.post(f"{self.urls[node_id]}/groups/{self.topic}/ack", json=body)
        )
        return result


def ok(response: httpx.Response) -> Any:
    assert response.status_code in (200, 201, 204), response.text
    return response.json() if response.content else None


@pytest.mark.full
@pytest.mark.row("A3", "C4", "C5")
@pytest.mark.timeout(240)
def test_any_broker_leases_and_acknowledges_records_of_all_partitions(three_brokers: Cluster) -> None:
    one = three_brokers
    create_topic(one, TOPIC, PARTITIONS)
    assert len({one.leader(TOPIC, index) for index in range(PARTITIONS)}) > 1
    with httpx.Client(timeout=scaled(30)) as http:
        group = Group(one, http, TOPIC)
        group.publish(20)
        # Records of all partitions come through each broker, and are acknowledged through another one.
        seen: Counter[str] = Counter()
        for turn in range(PARTITIONS * 20 // 10):
            records = group.receive(1 + turn % 3, 10, wait_ms=10_000)
            assert 1 <= len(records) <= 10
            assert {each["delivery_count"] for each in records} == {1}
            seen.update(each["value"] for each in records)
            result = group.ack(1 + (turn + 1) % 3, [each["receipt"] for each in records])
            assert result == {"acknowledged": len(records), "errors": []}

        def is_drained() -> (
            bool
        ):  # an empty answer may mean that the state of a share partition is being loaded
            records = group.receive(2, 100, wait_ms=1_000)
            seen.update(each["value"] for each in records)
            if records:
                group.ack(3, [each["receipt"] for each in records])
            return len(seen) == PARTITIONS * 20

        wait_until(is_drained, 30)
        assert seen == {f"{index}-{number}": 1 for index in range(PARTITIONS) for number in range(20)}
        listed = {each["group"]: each for each in ok(http.get(f"{group.urls[3]}/groups"))["groups"]}
        assert listed[TOPIC]["type"] == "share"  # the coordinator knows the group, whichever broker was asked
        # A second acknowledgement is refused like one on the leader.
        group.publish(1)
        records = group.receive(1, 1, wait_ms=10_000)
        receipts = [records[0]["receipt"]]
        assert group.ack(2, receipts)["acknowledged"] == 1
        refused = http.post(f"{group.urls[3]}/groups/{TOPIC}/ack", json={"receipts": receipts})
        assert refused.status_code == 409, refused.text


@pytest.mark.full
@pytest.mark.row("C4")
@pytest.mark.timeout(240)
def test_partitions_of_all_leaders_are_served_alike_and_one_waiting_call_gets_a_record_of_any(
    three_brokers: Cluster,
) -> None:
    one, topic = three_brokers, "fair"
    create_topic(one, topic, PARTITIONS)
    with httpx.Client(timeout=scaled(60)) as http, ThreadPoolExecutor(4) as pool:
        group = Group(one, http, topic)
        group.publish(1)
        begun: set[int] = set()

        def have_all_begun() -> bool:  # a leader serves a partition once it has loaded the state of the group
            records = group.receive(1, PARTITIONS, wait_ms=1_000)
            if records:  # a request without receipts is refused
                group.ack(1, [each["receipt"] for each in records])
            begun.update(each["partition"] for each in records)
            return len(begun) == PARTITIONS

        wait_until(have_all_begun, 30)
        group.publish(60)
        served = Counter(group.receive(1, 1, wait_ms=10_000)[0]["partition"] for _ in range(120))
        assert min(served[index] for index in range(PARTITIONS)) >= 5, served  # 20 expected of each
        leased = 120

        def is_all_leased() -> bool:  # for an hour: nothing is available any more
            nonlocal leased
            leased += len(group.receive(2, 1000, wait_ms=1_000))
            return leased == PARTITIONS * 60

        wait_until(is_all_leased, 30)
        for index in range(PARTITIONS):
            waiting = [pool.submit(group.receive, node_id, 1, 25_000) for node_id in (1, 2, 3)]
            stored = http.post(f"{group.urls[1]}/topics/{topic}/records?partition={index}", json="new")
            assert stored.status_code in (200, 201), stored.text
            wait_until(lambda waiting=waiting: any(each.done() for each in waiting), 20)
            found = [record for each in waiting if each.done() for record in each.result()]
            assert [each["partition"] for each in found] == [index]
            for _ in range(2):  # the others get one each
                ok(http.post(f"{group.urls[2]}/topics/{topic}/records?partition={index}", json="new"))
            everything = [record for each in waiting for record in each.result()]
            assert len(everything) == 3, everything
            assert {each["delivery_count"] for each in everything} == {1}


@pytest.mark.full
@pytest.mark.row("C4", "C5")
@pytest.mark.timeout(240)
def test_records_are_received_through_the_others_while_a_leader_dies(three_brokers: Cluster) -> None:
    one, topic = three_brokers, "failing"
    create_topic(one, topic, PARTITIONS)
    victim = one.leader(topic, 0)
    other = next(node_id for node_id in one.brokers if node_id != victim)
    seen: Counter[str] = Counter()
    acknowledged: set[str] = set()
    is_over = threading.Event()
    with httpx.Client(timeout=scaled(60)) as http:
        group = Group(one, http, topic)
        group.publish(50)

        def consume() -> None:
            while not is_over.is_set():
                response = http.post(
                    f"{group.urls[other]}/groups/{topic}/receive",
                    json={"topics": [topic], "max_records": 5, "wait_ms": 1000, "lease_ms": 5000},
                )
                assert response.status_code in (200, 503, 504), response.text
                for each in response.json().get("records", ()):
                    seen[each["value"]] += 1
                    done = http.post(
                        f"{group.urls[other]}/groups/{topic}/ack", json={"receipts": [each["receipt"]]}
                    )
                    assert done.status_code in (200, 409, 503, 504), done.text
                    if done.status_code == 200:
                        acknowledged.add(each["value"])

        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(consume)
            try:
                wait_until(lambda: len(acknowledged) >= 30 or work.done(), 60)
                one.kill(victim)
                expected = {f"{index}-{number}" for index in range(PARTITIONS) for number in range(50)}
                wait_until(lambda: set(seen) == expected or work.done(), 120)
            finally:
                is_over.set()
            work.result()
        one.start(victim)


@pytest.mark.full
@pytest.mark.row("C4")
@pytest.mark.timeout(240)
def test_acknowledgement_whose_answer_is_lost_is_reported_as_unknown(three_brokers: Cluster) -> None:
    one, topic = three_brokers, "lost"
    create_topic(one, topic, PARTITIONS)
    victim = one.leader(topic, 0)
    other = next(node_id for node_id in one.brokers if node_id != victim)
    with httpx.Client(timeout=scaled(60)) as http:
        group = Group(one, http, topic)
        stored = http.post(f"{group.urls[other]}/topics/{topic}/records?partition=0", json="one")
        assert stored.status_code in (200, 201), stored.text
        (record,) = group.receive(other, 1, wait_ms=20_000)
        one.pause(victim)
        try:
            receipts = {"receipts": [record["receipt"]]}
            lost = http.post(f"{group.urls[other]}/groups/{topic}/ack", json=receipts)
        finally:
            one.resume(victim)
        assert lost.status_code == 503, lost.text
        assert "unknown" in lost.text
        # The broker is back, or another one leads: the record is acknowledged, or its lease is refused as lost.
        wait_until(
            lambda: (
                http.post(f"{group.urls[other]}/groups/{topic}/ack", json=receipts).status_code in (200, 409)
            ),
            60,
        )


@pytest.mark.full
@pytest.mark.row("A4", "C4")
@pytest.mark.timeout(240)
def test_any_endpoint_receives_and_deletes_the_messages_of_a_queue(three_brokers: Cluster) -> None:
    clients = [sqs_client(url, attempts=3) for url in three_brokers.sqs_urls.values()]
    urls = [
        clients[0].create_queue(QueueName="many.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"],
        clients[0].create_queue(QueueName="many")["QueueUrl"],
    ]
    for queue in urls:
        is_fifo = queue.endswith(".fifo")
        own_url = [queue.replace(three_brokers.sqs_urls[1], url) for url in three_brokers.sqs_urls.values()]
        for number in range(60):
            options = {"MessageGroupId": f"g{number % 10}", "MessageDeduplicationId": str(number)}
            clients[number % 3].send_message(
                QueueUrl=own_url[number % 3], MessageBody=str(number), **(options if is_fifo else {})
            )
        received: list[str] = []
        turn = 0
        while len(received) < 60:
            answer = clients[turn % 3].receive_message(
                QueueUrl=own_url[turn % 3],
                MaxNumberOfMessages=10,
                WaitTimeSeconds=5,
                MessageSystemAttributeNames=["ApproximateReceiveCount"],
            )
            messages = answer.get("Messages", [])
            assert messages, received
            assert {each["Attributes"]["ApproximateReceiveCount"] for each in messages} == {"1"}
            received += [each["Body"] for each in messages]
            entries = [
                {"Id": str(index), "ReceiptHandle": each["ReceiptHandle"]}
                for index, each in enumerate(messages)
            ]
            turn += 1
            deleted = clients[turn % 3].delete_message_batch(QueueUrl=own_url[turn % 3], Entries=entries)
            assert not deleted.get("Failed"), deleted
        assert sorted(received, key=int) == [str(number) for number in range(60)]
        if is_fifo:
            for group in range(10):
                own = [int(each) for each in received if int(each) % 10 == group]
                assert own == sorted(own)
