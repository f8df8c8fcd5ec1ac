"""HTTP API and its description: requests made from `/v1/openapi.json`, valid and invalid, get answers as described.

Most paths name a topic or group that exists, so that requests get beyond 404.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mansio.api.http.v1.operation import NoParameters
from mansio.api.http.v1.routes import OPERATIONS
from mansio.testing.broker import TestBroker
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from schemathesis import Case

    from mansio.api.http.v1.operation import Operation

EXAMPLES: Final = int(os.environ.get("MANSIO_SCHEMATHESIS_EXAMPLES", "15"))
"""Examples of each operation, of valid and of invalid requests."""

DEADLINE_S: Final = 20.0
WAIT_MS: Final = 20
PARTITIONS_MAX: Final = 4
EVERY_MS_MIN: Final = 3_600_000
NAMES: Final = {
    "topic": ("t", "delayed", "none"),
    "group": ("g", "classic", "none"),
    "name": ("hourly", "none"),
}
PARTITIONS: Final = (0, 1, 7)
"""Names in paths, of which one does not exist."""

STREAM: Final = "/topics/{topic}/events"
SMOKE: Final = "/topics/{topic}/records/batch"
CREATED: Final = "made"


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(auto_create_topics_enable=False) as started:
        with started.client() as client:
            client.admin.create_topic("t", partitions=2)
            client.admin.create_topic("delayed", partitions=1, config={"mansio.delay.enable": "true"})
            client.admin.reset_offsets("classic", ["t"], to="earliest")
            client.admin.alter_group_config("g", {"share.auto.offset.reset": "earliest"})
        yield started


@pytest.fixture(scope="module")
def description(broker: TestBroker) -> Any:
    return httpx.get(f"{broker.http_url}/v1/openapi.json", timeout=scaled(DEADLINE_S)).json()


def _bounded(case: Case) -> Case:
    """Lower what a request makes the broker do: waits, partitions, and firings."""
    parts: list[Any] = [case.query, case.body]
    for values in parts:
        if not isinstance(values, dict):
            continue
        for name, limit in (("wait_ms", WAIT_MS), ("partitions", PARTITIONS_MAX)):
            if type(values.get(name)) is int:
                values[name] = min(values[name], limit)
        if type(values.get("every_ms")) is int and values["every_ms"] > 0:
            values["every_ms"] = max(values["every_ms"], EVERY_MS_MIN)
    return case


def _requests(operation: Any, *, valid: bool, deletes: bool) -> st.SearchStrategy[Case]:
    from schemathesis import GenerationMode

    mode = GenerationMode.POSITIVE if valid else GenerationMode.NEGATIVE
    names = {
        name: st.sampled_from((CREATED, "none") if deletes else known) for name, known in NAMES.items()
    } | {"partition": st.sampled_from(PARTITIONS)}

    def with_names(case: Case, chosen: dict[str, Any]) -> Case:
        if case.path_parameters and chosen:
            case.path_parameters.update(
                {name: value for name, value in chosen.items() if name in case.path_parameters}
            )
        return _bounded(case)

    chosen: st.SearchStrategy[Any] = st.one_of(
        st.fixed_dictionaries(names), st.fixed_dictionaries(names), st.just({})
    )
    return st.builds(with_names, operation.as_strategy(generation_mode=mode), chosen)


def _has_invalid_requests(operation: Operation) -> bool:
    """Whether a request can differ from its description, which any text in the path does not."""
    return (
        operation.body is not None or operation.query is not NoParameters or "{partition}" in operation.path
    )


@pytest.mark.parametrize(
    ("method", "path", "valid"),
    [
        pytest.param(
            each.method,
            each.path,
            valid,
            marks=() if each.path == SMOKE else pytest.mark.full,
            id=f"{each.method}-{each.path}-{'valid' if valid else 'invalid'}",
        )
        for each in OPERATIONS
        for valid in (True, False)
        if valid or _has_invalid_requests(each)
    ],
)
def test_generated_requests_get_the_answers_that_the_description_names(
    broker: TestBroker, description: Any, method: str, path: str, valid: bool
) -> None:
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    operation = schemathesis.openapi.from_dict(description)[f"/v1{path}"][method]
    every = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    if not valid and path != STREAM:
        every.append(checks.negative_data_rejection)
    url = broker.http_url
    limit_s = scaled(DEADLINE_S)

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=_requests(operation, valid=valid, deletes=method == "DELETE"))
    def run(case: Case) -> None:
        if path == STREAM:
            _open_stream(case, url, limit_s)
        else:
            case.call_and_validate(
                base_url=url, headers={"x-mansio-request": "1"}, checks=every, timeout=limit_s
            )

    run()


def _open_stream(case: Case, url: str, limit_s: float) -> None:
    """Begin to read a stream of events, which does not end."""
    import requests

    arguments = case.as_transport_kwargs(base_url=url)
    with requests.request(**arguments, timeout=limit_s, stream=True) as response:
        assert response.status_code < 500, response.text
        if response.status_code == 200:
            assert next(response.iter_content(8)) == b"retry: 1"[:8]
        else:
            assert response.headers["content-type"] == "application/problem+json"


# What the generated requests have found, for the runs without them


@pytest.mark.parametrize(
    ("path", "body", "pointer"),
    [
        ("/topics/t/records/batch", {"records": [{"partition": True}]}, "/records/0/partition"),
        ("/topics/t/records/batch", {"records": [{"delay_ms": "5"}]}, "/records/0/delay_ms"),
        ("/groups/g/receive", {"topics": ["t"], "max_records": True}, "/max_records"),
        ("/groups/g/retry", {"receipts": ["a"], "delay_ms": False}, "/delay_ms"),
    ],
)
def test_a_boolean_or_text_is_no_number(broker: TestBroker, path: str, body: Any, pointer: str) -> None:
    answer = httpx.post(f"{broker.http_url}/v1{path}", json=body, timeout=scaled(DEADLINE_S))
    assert answer.status_code == 400, answer.text
    assert answer.json()["errors"][0]["pointer"] == pointer


@pytest.mark.parametrize(
    "body", [{"topic": "none", "partition": 0}, {"topic": "t", "partition": 7}], ids=["topic", "partition"]
)
def test_a_redrive_of_what_does_not_exist_is_refused_at_once(broker: TestBroker, body: Any) -> None:
    url = f"{broker.http_url}/v1/groups/g/dead-letters/redrive"
    answer = httpx.post(url, json=body, timeout=scaled(DEADLINE_S))
    assert answer.status_code == 404, answer.text
    assert answer.json()["title"] == "UnknownTopicOrPartition"
