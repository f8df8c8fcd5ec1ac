"""Rights for subjects: who lacks one is refused, and learns nothing of what exists."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from mansio.state.authorization.acls import (
    CLUSTER_NAME,
    WILDCARD,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from mansio.testing import TestBroker
from support.machine import scaled
from support.secured_broker import set_password

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.row("A7"), pytest.mark.full]

PASSWORD = "correct-horse"
SCHEMA = {"schema": '{"type":"record","name":"Secret","fields":[]}'}


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(
        listeners="SASL_PLAINTEXT://127.0.0.1:0,PLAINTEXT://127.0.0.1:0",
        open_listeners="PLAINTEXT",
        http_security_protocol="SASL_PLAINTEXT",
        authorizer="acl",
        super_users="User:admin",
    ) as running:
        for name in ("admin", "ann", "bob", "cat", "dan", "eve", "fay"):
            set_password(running, name, PASSWORD)
        yield running


def ask(broker: TestBroker, user: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    answer = httpx.request(
        method,
        broker.registry_url + path,
        content=None if body is None else json.dumps(body),
        headers={"content-type": "application/json"},
        auth=(user, PASSWORD),
        timeout=scaled(30),
        trust_env=False,
    )
    return answer.status_code, answer.json()


def allow(
    broker: TestBroker,
    user: str,
    operation: Operation,
    name: str,
    kind: ResourceType = ResourceType.SUBJECT,
    pattern: PatternType = PatternType.LITERAL,
) -> None:
    acl = Acl(kind, pattern, name, f"User:{user}", WILDCARD, operation, Permission.ALLOW)

    async def add() -> None:
        broker._running().service.authorization.authorizer.add(acl)

    broker._call(add(), scaled(30))


REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/subjects/secret/versions", None),
    ("GET", "/subjects/secret/versions/1", None),
    ("GET", "/subjects/secret/versions/1/referencedby", None),
    ("POST", "/subjects/secret", SCHEMA),
    ("POST", "/subjects/secret/versions", SCHEMA),
    ("POST", "/compatibility/subjects/secret/versions/1", SCHEMA),
    ("DELETE", "/subjects/secret", None),
    ("DELETE", "/subjects/secret/versions/1", None),
    ("GET", "/config/secret", None),
    ("PUT", "/config/secret", {"compatibility": "NONE"}),
    ("DELETE", "/config/secret", None),
    ("GET", "/mode/secret", None),
    ("PUT", "/mode/secret", {"mode": "READONLY"}),
    ("GET", "/config", None),
    ("PUT", "/config", {"compatibility": "NONE"}),
    ("PUT", "/mode", {"mode": "READONLY"}),
]


def test_without_rights_each_request_is_refused_whether_the_subject_exists_or_not(broker: TestBroker) -> None:
    status, registered = ask(broker, "admin", "POST", "/subjects/secret/versions", SCHEMA)
    assert status == 200
    for method, path, body in REQUESTS:
        status, found = ask(broker, "ann", method, path, body)
        assert (status, found["error_code"]) == (403, 40301), (method, path)
        absent = ask(broker, "ann", method, path.replace("secret", "absent"), body)
        assert absent == (status, {**found, "message": found["message"].replace("secret", "absent")})
    schema_id, guid = registered["id"], registered["guid"]
    for path in (f"/schemas/ids/{schema_id}", f"/schemas/ids/{schema_id}/versions", f"/schemas/guids/{guid}"):
        status, found = ask(broker, "ann", "GET", path)
        assert (status, found["error_code"]) == (404, 40403), path
    assert ask(broker, "ann", "GET", "/subjects") == (200, [])
    assert ask(broker, "ann", "GET", "/schemas") == (200, [])
    assert ask(broker, "admin", "GET", "/subjects/secret/versions") == (200, [1])
    assert ask(broker, "admin", "GET", "/config") == (200, {"compatibilityLevel": "BACKWARD"})
    assert ask(broker, "admin", "GET", "/mode") == (200, {"mode": "READWRITE"})


def test_each_right_allows_what_it_names_and_no_more(broker: TestBroker) -> None:
    allow(broker, "bob", Operation.WRITE, "bob-", pattern=PatternType.PREFIXED)
    status, registered = ask(broker, "bob", "POST", "/subjects/bob-value/versions", SCHEMA)
    assert status == 200
    assert ask(broker, "bob", "GET", "/subjects/bob-value/versions")[0] == 403
    assert ask(broker, "bob", "POST", "/subjects/other/versions", SCHEMA)[0] == 403
    allow(broker, "bob", Operation.READ, "bob-value")
    assert ask(broker, "bob", "GET", "/subjects") == (200, ["bob-value"])
    assert ask(broker, "bob", "GET", f"/schemas/ids/{registered['id']}")[0] == 200
    used = ask(broker, "bob", "GET", f"/schemas/ids/{registered['id']}/versions")
    assert used == (200, [{"subject": "bob-value", "version": 1}])
    allow(broker, "bob", Operation.ALTER_CONFIGS, "bob-value")
    assert ask(broker, "bob", "PUT", "/config/bob-value", {"compatibility": "NONE"})[0] == 200
    assert ask(broker, "bob", "PUT", "/config", {"compatibility": "NONE"})[0] == 403
    allow(broker, "bob", Operation.ALTER_CONFIGS, CLUSTER_NAME, ResourceType.CLUSTER)
    assert ask(broker, "bob", "PUT", "/config", {"compatibility": "BACKWARD"})[0] == 200
    assert ask(broker, "bob", "DELETE", "/subjects/bob-value")[0] == 403
    allow(broker, "bob", Operation.DELETE, "bob-value")
    assert ask(broker, "bob", "DELETE", "/subjects/bob-value") == (200, [1])


def test_an_alias_shows_and_changes_nothing_of_the_subject_behind_it(broker: TestBroker) -> None:
    assert ask(broker, "admin", "POST", "/subjects/behind/versions", SCHEMA)[0] == 200
    for operation in (Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER_CONFIGS):
        allow(broker, "cat", operation, "front")
    status, found = ask(broker, "cat", "PUT", "/config/front", {"alias": "behind"})
    assert (status, found["error_code"]) == (403, 40301)
    assert ask(broker, "admin", "PUT", "/config/front", {"alias": "behind"})[0] == 200
    for method, path, body in (
        ("GET", "/subjects/front/versions", None),
        ("GET", "/subjects/front/versions/latest", None),
        ("POST", "/subjects/front", SCHEMA),
        ("POST", "/subjects/front/versions", SCHEMA),
        ("DELETE", "/subjects/front", None),
    ):
        status, found = ask(broker, "cat", method, path, body)
        assert (status, found["error_code"]) == (403, 40301), (method, path)
    allow(broker, "cat", Operation.READ, "behind")
    assert ask(broker, "cat", "GET", "/subjects/front/versions") == (200, [1])


def test_a_reference_shows_nothing_of_a_subject_that_may_not_be_read(broker: TestBroker) -> None:
    hidden = {"schema": '{"type":"record","name":"Hidden","fields":[{"name":"key","type":"string"}]}'}
    assert ask(broker, "admin", "POST", "/subjects/hidden/versions", hidden)[0] == 200
    allow(broker, "dan", Operation.WRITE, "mine")
    allow(broker, "dan", Operation.READ, "mine")
    referring = {
        "schema": '{"type":"record","name":"Mine","fields":[{"name":"hidden","type":"Hidden"}]}',
        "references": [{"name": "Hidden", "subject": "hidden", "version": 1}],
    }
    paths = ("/subjects/mine", "/subjects/mine/versions", "/compatibility/subjects/mine/versions")
    for path in paths:
        status, found = ask(broker, "dan", "POST", path, referring)
        assert (status, found["error_code"]) == (403, 40301), path
        absent = {**referring, "references": [{"name": "Hidden", "subject": "absent", "version": 1}]}
        answer = (status, {**found, "message": found["message"].replace("hidden", "absent")})
        assert ask(broker, "dan", "POST", path, absent) == answer
    allow(broker, "dan", Operation.READ, "hidden")
    assert ask(broker, "dan", "POST", "/subjects/mine/versions", referring)[0] == 200


def test_who_chooses_ids_has_the_right_for_the_cluster(broker: TestBroker) -> None:
    allow(broker, "eve", Operation.ALTER_CONFIGS, "imported")
    assert ask(broker, "eve", "PUT", "/mode/imported", {"mode": "IMPORT"})[0] == 403
    assert ask(broker, "eve", "PUT", "/mode/imported", {"mode": "READONLY"})[0] == 200
    assert ask(broker, "admin", "PUT", "/mode/imported", {"mode": "IMPORT"})[0] == 200


def test_why_a_schema_is_not_compatible_needs_read_of_the_subject(broker: TestBroker) -> None:
    earlier = {"schema": '{"type":"record","name":"Told","fields":[{"name":"salary","type":"long"}]}'}
    later = {"schema": '{"type":"record","name":"Told","fields":[{"name":"salary","type":"string"}]}'}
    assert ask(broker, "admin", "POST", "/subjects/salaries/versions", earlier)[0] == 200
    allow(broker, "fay", Operation.WRITE, "salaries")
    status, found = ask(broker, "fay", "POST", "/subjects/salaries/versions", later)
    assert status == 409
    assert "TYPE_MISMATCH" not in found["message"]
    allow(broker, "fay", Operation.READ, "salaries")
    status, found = ask(broker, "fay", "POST", "/subjects/salaries/versions", later)
    assert status == 409
    assert "TYPE_MISMATCH" in found["message"]
