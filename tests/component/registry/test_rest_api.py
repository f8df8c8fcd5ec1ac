"""The REST API of the schema registry: what each endpoint answers, and the error codes that clients test for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

import httpx
import pytest

from mansio.testing import TestBroker
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.row("A7")

MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"


def record(*fields: dict[str, Any]) -> str:
    return json.dumps({"type": "record", "name": "Order", "fields": list(fields)}, separators=(",", ":"))


FIRST = record({"name": "id", "type": "long"})
SECOND = record({"name": "id", "type": "long"}, {"name": "note", "type": "string", "default": ""})
BREAKING = record({"name": "id", "type": "long"}, {"name": "price", "type": "double"})


class Api:
    """Requests to the registry of one broker. Use as `with`."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(
            base_url=url, headers={"content-type": MEDIA_TYPE}, timeout=scaled(30), trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON answer; (status, error code) of a refusal."""
        answer = self.client.request(method, path, content=None if body is None else json.dumps(body))
        assert answer.headers["content-type"] == MEDIA_TYPE
        found = answer.json()
        if answer.status_code != 200:
            assert isinstance(found["message"], str)
            return answer.status_code, found["error_code"]
        return found

    def register(self, subject: str, text: str, **more: Any) -> Any:
        found = self.ask("POST", f"/subjects/{subject}/versions", {"schema": text, **more})
        return found["id"] if isinstance(found, dict) else found


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


@pytest.fixture(scope="module")
def api(broker: TestBroker) -> Iterator[Api]:
    with Api(broker.registry_url) as made:
        yield made


def test_a_schema_is_registered_evolved_and_found(api: Api) -> None:
    first_text, second_text = FIRST.replace("Order", "Evolved"), SECOND.replace("Order", "Evolved")
    first, second = api.register("evolved", first_text), api.register("evolved", second_text)
    assert api.register("evolved", first_text) == first, "the same schema keeps its id"
    assert api.register("another", first_text) == first, "also in another subject"
    assert api.ask("GET", "/subjects/evolved/versions") == [1, 2]
    latest = api.ask("GET", "/subjects/evolved/versions/latest")
    assert (
        latest
        == api.ask("GET", "/subjects/evolved/versions/-1")
        == api.ask("GET", "/subjects/evolved/versions/2")
    )
    assert (latest["subject"], latest["version"], latest["id"], latest["schema"]) == (
        "evolved",
        2,
        second,
        second_text,
    )
    assert api.ask("GET", f"/schemas/ids/{first}")["schema"] == first_text
    assert api.ask("GET", f"/schemas/ids/{first}?fetchMaxId=true")["maxId"] >= second
    assert api.ask("GET", f"/schemas/ids/{first}/schema") == json.loads(first_text)
    assert api.ask("GET", "/subjects/evolved/versions/1/schema") == json.loads(first_text)
    assert api.ask("GET", f"/schemas/ids/{first}/subjects") == ["another", "evolved"]
    uses = [{"subject": "another", "version": 1}, {"subject": "evolved", "version": 1}]
    assert api.ask("GET", f"/schemas/ids/{first}/versions") == uses
    guid = latest["guid"]
    assert api.ask("GET", f"/schemas/guids/{guid}")["schema"] == second_text
    assert api.ask("GET", f"/schemas/guids/{guid}/ids") == [{"context": ".", "id": second}]
    found = api.ask("POST", "/subjects/evolved", {"schema": first_text})
    assert (found["version"], found["id"]) == (1, first)


@pytest.mark.full
def test_white_space_makes_no_new_schema(api: Api) -> None:
    spaced = json.dumps(json.loads(FIRST), indent=4)
    assert api.register("spaced", spaced) == api.register("spaced", FIRST)
    assert api.ask("GET", "/subjects/spaced/versions") == [1]


def test_a_change_that_breaks_readers_is_refused_unless_the_level_allows_it(api: Api) -> None:
    api.register("checked", FIRST)
    assert api.register("checked", BREAKING) == (409, 409)
    path = "/compatibility/subjects/checked/versions"
    assert api.ask("POST", f"{path}/latest", {"schema": SECOND}) == {"is_compatible": True}
    assert api.ask("POST", path, {"schema": BREAKING}) == {"is_compatible": False}
    verbose = api.ask("POST", f"{path}/1?verbose=true", {"schema": BREAKING})
    assert verbose["is_compatible"] is False
    assert "price" in verbose["messages"][0]
    assert "READER_FIELD_MISSING_DEFAULT_VALUE" in verbose["messages"][0]
    assert api.ask("PUT", "/config/checked", {"compatibility": "FORWARD"}) == {"compatibility": "FORWARD"}
    assert api.ask("GET", "/config/checked") == {"compatibilityLevel": "FORWARD"}
    api.register("checked", BREAKING)
    assert api.ask("DELETE", "/config/checked") == {"compatibilityLevel": "FORWARD"}
    assert api.ask("GET", "/config/checked") == (404, 40408)
    assert api.ask("GET", "/config/checked?defaultToGlobal=true") == {"compatibilityLevel": "BACKWARD"}


@pytest.mark.full
def test_a_transitive_level_compares_with_all_versions(api: Api) -> None:
    api.ask("PUT", "/config/transitive", {"compatibility": "NONE"})
    for text in (FIRST, BREAKING):
        api.register("transitive", text)
    api.ask("PUT", "/config/transitive", {"compatibility": "BACKWARD"})
    same_as_last = record(
        {"name": "id", "type": "long"},
        {"name": "price", "type": "double"},
        {"name": "x", "type": "int", "default": 1},
    )
    path = "/compatibility/subjects/transitive/versions"
    assert api.ask("POST", path, {"schema": same_as_last}) == {"is_compatible": True}
    api.ask("PUT", "/config/transitive", {"compatibility": "BACKWARD_TRANSITIVE"})
    assert api.ask("POST", path, {"schema": same_as_last}) == {"is_compatible": False}


@pytest.mark.full
def test_a_deletion_is_soft_first_and_permanent_then(api: Api) -> None:
    schema_id = api.register("deleted", FIRST)
    api.register("deleted", SECOND)
    assert api.ask("DELETE", "/subjects/deleted/versions/1?permanent=true") == (404, 40407)
    assert api.ask("DELETE", "/subjects/deleted/versions/1") == 1
    assert api.ask("DELETE", "/subjects/deleted/versions/1") == (404, 40406)
    assert api.ask("GET", "/subjects/deleted/versions") == [2]
    assert api.ask("GET", "/subjects/deleted/versions?deleted=true") == [1, 2]
    assert api.ask("GET", "/subjects/deleted/versions/1") == (404, 40402)
    assert api.ask("GET", "/subjects/deleted/versions/1?deleted=true")["deleted"] is True
    assert api.ask("GET", f"/schemas/ids/{schema_id}")["schema"] == FIRST
    assert api.ask("DELETE", "/subjects/deleted?permanent=true") == (404, 40405)
    assert api.ask("DELETE", "/subjects/deleted") == [2]
    assert api.ask("DELETE", "/subjects/deleted") == (404, 40404)
    assert "deleted" not in api.ask("GET", "/subjects")
    assert "deleted" in api.ask("GET", "/subjects?deleted=true")
    assert api.ask("GET", "/subjects?subjectPrefix=deleted&deletedOnly=true") == ["deleted"]
    assert api.ask("DELETE", "/subjects/deleted?permanent=true") == [1, 2]
    assert api.ask("DELETE", "/subjects/deleted") == (404, 40401)


@pytest.mark.full
def test_a_schema_with_references_is_resolved_and_what_it_refers_to_is_kept(api: Api) -> None:
    api.register("customer", '{"type":"record","name":"Customer","fields":[{"name":"name","type":"string"}]}')
    text = record({"name": "customer", "type": "Customer"})
    reference = {"name": "Customer", "subject": "customer", "version": 1}
    assert api.register("order", text) == (422, 42201)
    schema_id = api.register("order", text, references=[reference])
    assert api.ask("GET", "/subjects/order/versions/1")["references"] == [reference]
    assert api.ask("GET", "/subjects/customer/versions/1/referencedby") == [schema_id]
    assert api.ask("DELETE", "/subjects/customer/versions/1") == (422, 42206)
    assert api.register("order-2", text, references=[{**reference, "version": 9}]) == (422, 42201)


@pytest.mark.full
def test_in_import_mode_schemas_keep_their_ids(api: Api) -> None:
    assert api.register("imported", FIRST, id=5_000, version=3) == (422, 42205)
    assert api.ask("PUT", "/mode", {"mode": "IMPORT"}) == (422, 42205)
    assert api.ask("PUT", "/mode/imported", {"mode": "IMPORT"}) == {"mode": "IMPORT"}
    text = '"string"'
    assert api.register("imported", text, id=5_000, version=3) == 5_000
    assert api.register("imported", BREAKING.replace("Order", "Taken"), id=5_000, version=4) == (422, 42205)
    assert api.ask("PUT", "/mode/imported", {"mode": "READONLY"}) == {"mode": "READONLY"}
    assert api.register("imported", FIRST) == (422, 42205)
    assert api.ask("DELETE", "/mode/imported") == {"mode": "READONLY"}
    assert api.ask("GET", "/mode/imported") == (404, 40409)
    assert api.ask("GET", "/mode/imported?defaultToGlobal=true") == {"mode": "READWRITE"}
    assert api.ask("GET", "/subjects/imported/versions") == [3]


@pytest.mark.full
def test_all_schemas_are_listed_in_pages(api: Api) -> None:
    for number in range(3):
        api.register(f"listed-{number}", FIRST)
    found = api.ask("GET", "/schemas?subjectPrefix=listed-&offset=1&limit=1")
    assert [each["subject"] for each in found] == ["listed-1"]
    assert api.ask("GET", "/subjects?subjectPrefix=listed-&offset=2") == ["listed-2"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "/subjects/none/versions", None, (404, 40401)),
        ("GET", "/subjects/none/versions/1", None, (404, 40401)),
        ("GET", "/schemas/ids/99999", None, (404, 40403)),
        ("GET", "/schemas/guids/00000000-0000-0000-0000-000000000000", None, (404, 40403)),
        ("GET", "/schemas/guids/x", None, (404, 40403)),
        ("GET", "/subjects/none/versions/zero", None, (422, 42202)),
        ("GET", "/subjects/none/versions/0", None, (422, 42202)),
        ("GET", "/schemas/ids/one", None, (422, 422)),
        ("POST", "/subjects/none", {"schema": FIRST}, (404, 40401)),
        ("POST", "/subjects/x/versions", {"schema": "{"}, (422, 42201)),
        ("POST", "/subjects/x/versions", {"schema": 3}, (422, 42201)),
        ("POST", "/subjects/x/versions", {}, (422, 42201)),
        ("POST", "/subjects/x/versions", {"schema": FIRST, "schemaType": "XML"}, (422, 42201)),
        ("POST", "/subjects/x/versions", [], (422, 422)),
        ("POST", f"/subjects/{'x' * 2_000}/versions", {"schema": FIRST}, (422, 42208)),
        ("POST", "/compatibility/subjects/none/versions/1", {"schema": FIRST}, (404, 40401)),
        ("PUT", "/config", {"compatibility": "SOMEHOW"}, (422, 42203)),
        ("PUT", "/mode", {"mode": "SOMEHOW"}, (422, 42204)),
        ("DELETE", "/config/none", None, (404, 40401)),
    ],
)
def test_a_refusal_has_the_status_and_code_of_the_api(
    api: Api, method: str, path: str, body: Any, expected: tuple[int, int]
) -> None:
    assert api.ask(method, path, body) == expected


@pytest.mark.full
def test_what_clients_ask_first_is_answered(api: Api, broker: TestBroker) -> None:
    assert api.ask("GET", "/schemas/types") == ["JSON", "PROTOBUF", "AVRO"]
    assert api.ask("GET", "") == api.ask("GET", "/") == {}
    assert api.ask("GET", "/contexts") == ["."]
    assert api.ask("GET", "/config") == {"compatibilityLevel": "BACKWARD"}
    assert api.ask("GET", "/mode") == {"mode": "READWRITE"}
    assert "kafka-cluster" in httpx.get(f"{broker.registry_url}/v1/metadata/id").json()["scope"]["clusters"]


@pytest.mark.full
def test_a_page_of_another_site_changes_nothing(api: Api) -> None:
    answer = api.client.put(
        "/config", content='{"compatibility":"NONE"}', headers={"origin": "http://elsewhere"}
    )
    assert answer.status_code == 403
    answer = api.client.put(
        "/config", content='{"compatibility":"NONE"}', headers={"content-type": "text/plain"}
    )
    assert answer.status_code == 403
    assert api.ask("GET", "/config") == {"compatibilityLevel": "BACKWARD"}


@pytest.mark.full
def test_the_registry_is_the_same_after_a_restart() -> None:
    with TestBroker() as broker:
        with Api(broker.registry_url) as api:
            first = api.register("kept", FIRST)
            api.ask("PUT", "/config/kept", {"compatibility": "NONE"})
        broker.restart()
        with Api(broker.registry_url) as api:
            assert api.ask("GET", f"/schemas/ids/{first}")["schema"] == FIRST
            assert api.ask("GET", "/config/kept") == {"compatibilityLevel": "NONE"}
            assert api.register("kept", BREAKING) == first + 1


@pytest.mark.full
def test_a_topic_of_another_registry_is_neither_read_nor_written() -> None:
    with TestBroker() as broker, Api(broker.registry_url) as api:
        client = broker.client()
        client.admin.create_topic("_schemas", partitions=1)
        assert api.ask("GET", "/subjects") == (500, 50001)
        assert api.register("x", FIRST) == (500, 50001)
        client.publish("_schemas", b"{}", key=b"{}")


def test_a_schema_without_contract_has_the_contract_of_the_version_before(api: Api) -> None:
    contract = {"properties": {"owner": "shop"}}
    first = api.ask("POST", "/subjects/contract/versions", {"schema": FIRST, "metadata": contract})
    assert api.register("contract", FIRST) == first["id"]
    api.register("contract", SECOND)
    assert api.ask("GET", "/subjects/contract/versions/latest")["metadata"] == contract


def test_a_subject_may_name_the_default_context_and_no_other(api: Api) -> None:
    schema_id = api.register("context", FIRST)
    assert api.register(":.:context", FIRST) == schema_id
    assert api.ask("GET", "/subjects/:.:context/versions/1")["subject"] == "context"
    assert "context" in api.ask("GET", "/subjects?subjectPrefix=:*:cont")
    assert api.ask("GET", "/subjects/:.other:context/versions") == (422, 42208)


@pytest.mark.parametrize("number", ["\u0661", "1_0", "%20 1", "0", "1.0"])
def test_a_version_is_a_decimal_number(api: Api, number: str) -> None:
    assert api.ask("GET", f"/subjects/context/versions/{number}") == (422, 42202)


def test_a_setting_that_would_not_be_applied_is_refused(api: Api) -> None:
    setting = {"compatibility": "FULL", "compatibilityGroup": "application.version"}
    assert api.ask("PUT", "/config/group", setting) == (422, 42205)
    assert api.ask("GET", "/config/group") == (404, 40408)
