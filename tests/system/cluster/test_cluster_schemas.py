"""The schema registry of a cluster: two brokers that register the same schema at the same moment give it one id, also
while brokers are killed, and what one broker has answered every other one answers, too."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.cluster import cluster
from support.machine import scaled
from support.waiting import wait_until
from system.cluster.load import create_topic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.cluster import Cluster

pytestmark = [pytest.mark.full, pytest.mark.row("A7", "C1")]

SCHEMAS_TOPIC = "_schemas"
ROUNDS_PER_KILL = 6
KILLS = 3


def text_of(number: int) -> str:
    return json.dumps({"type": "record", "name": f"R{number}", "fields": []}, separators=(",", ":"))


def ask(one: Cluster, node_id: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    answer = httpx.request(
        method,
        f"{one.brokers[node_id].http_url}/registry{path}",
        json=body,
        timeout=scaled(60),
        trust_env=False,
    )
    return answer.status_code, answer.json()


def until_answered(deadline_s: float, request: Callable[[], tuple[int, Any]]) -> Any:
    """Repeat a request while the broker is away or has no leader to ask, as clients do. Any other refusal fails."""

    def answered() -> Any:
        try:
            status, found = request()
        except httpx.HTTPError:
            return None
        assert status in (200, 503), found
        return [found] if status == 200 else None

    return wait_until(answered, deadline_s, "the registry answers")[0]


def register(one: Cluster, node_id: int, subject: str, number: int) -> int:
    body = {"schema": text_of(number)}
    found = until_answered(90, lambda: ask(one, node_id, "POST", f"/subjects/{subject}/versions", body))
    return int(found["id"])


@pytest.mark.timeout(600)
def test_a_new_schema_gets_one_id_through_kills_and_every_broker_has_it(tmp_path: Path) -> None:
    """The two that register go through those brokers that are not killed; the leader is, each time."""
    ids: dict[int, set[int]] = {}
    with cluster(tmp_path, http=True) as one, ThreadPoolExecutor(2) as threads:
        create_topic(one, "any")
        ids[0] = {register(one, 1, "before", 0)}
        number = 1
        for _ in range(KILLS):
            one.wait_in_sync(SCHEMAS_TOPIC)
            killed = one.leader(SCHEMAS_TOPIC)
            others = [each for each in one.brokers if each != killed]
            begun = threading.Barrier(2)

            def both(node_id: int, first: int, begun: threading.Barrier = begun) -> list[int]:
                found = []
                for each in range(first, first + ROUNDS_PER_KILL):
                    begun.wait(scaled(120))
                    found.append(register(one, node_id, f"subject-{node_id}-{each}", each))
                return found

            work = [threads.submit(both, node_id, number) for node_id in others]
            wait_until(partial(has, one, others[0], number), 90, "the first schema")
            one.kill(killed)
            for offset, found in enumerate(zip(*(each.result(scaled(300)) for each in work), strict=True)):
                ids[number + offset] = set(found)
            number += ROUNDS_PER_KILL
            one.start(killed)
        assert {each: len(found) for each, found in ids.items()} == dict.fromkeys(ids, 1)
        every = [next(iter(found)) for found in ids.values()]
        assert len(set(every)) == len(every), "two schemas have one id"
        for node_id in one.brokers:
            for each, (schema_id,) in ids.items():
                answer = until_answered(60, partial(ask, one, node_id, "GET", f"/schemas/ids/{schema_id}"))
                assert answer["schema"] == text_of(each)
        one.check_logs()


def has(one: Cluster, node_id: int, number: int) -> bool:
    """Whether the subject of a broker has the schema with a number."""
    try:
        body = {"schema": text_of(number)}
        return ask(one, node_id, "POST", f"/subjects/subject-{node_id}-{number}", body)[0] == 200
    except httpx.HTTPError:
        return False


@pytest.mark.timeout(300)
def test_what_one_broker_has_registered_every_other_one_answers_at_once(tmp_path: Path) -> None:
    with cluster(tmp_path, http=True) as one:
        create_topic(one, "any")
        until_answered(60, lambda: ask(one, 1, "GET", "/subjects"))
        for number in range(10):
            writer, reader = 1 + number % 3, 1 + (number + 1) % 3
            subject = f"subject-{number}"
            path, body = f"/subjects/{subject}/versions", {"schema": text_of(number)}
            registered = until_answered(60, partial(ask, one, writer, "POST", path, body))
            assert ask(one, reader, "GET", f"/subjects/{subject}/versions") == (200, [1])
            assert ask(one, reader, "GET", f"/schemas/ids/{registered['id']}")[1]["schema"] == text_of(number)
            assert ask(one, writer, "DELETE", f"/subjects/{subject}") == (200, [1])
            assert ask(one, reader, "GET", f"/subjects/{subject}/versions")[1]["error_code"] == 40401
        one.check_logs()
