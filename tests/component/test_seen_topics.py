"""HTTP and gRPC with users: topics, metrics and health checks name only what a user may describe."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final

import grpc
import httpx
import pytest

from mansio.api.grpc import mansio_pb2 as pb
from mansio.broker.topics.topics import NewTopic
from mansio.state.authorization.acls import CLUSTER_NAME, AclFilter, Operation
from support.authorization import CLUSTER, PEER, TOPIC, acl
from support.certificates import Authority
from support.machine import scaled
from support.secured_broker import secured_broker, set_password
from support.tls_listener import client_context

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from mansio.state.authorization.acls import Acl
    from mansio.testing.broker import TestBroker

TIMEOUT_S: Final = 30
ALICE: Final = ("alice", "correct horse")
SEEN, HIDDEN = "seen", "hidden"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def context(authority: Authority) -> ssl.SSLContext:
    return client_context(authority.certificate)


@pytest.fixture(scope="module")
def started(authority: Authority) -> Iterator[TestBroker]:
    settings = {"http_security_protocol": "SASL_SSL", "grpc_security_protocol": "SASL_SSL"}
    with secured_broker(authority, authority.issue(), authorizer="acl", **settings) as broker:
        set_password(broker, *ALICE)
        for name in (SEEN, HIDDEN):
            call(broker, broker._running().service.topics.create(NewTopic(name, 1)))
        yield broker


@pytest.fixture
def broker(started: TestBroker) -> Iterator[TestBroker]:
    """A broker on which alice has no right."""
    yield started
    call(started, started._running().service.acls.delete_each([AclFilter()], caller=PEER))


def call(broker: TestBroker, work: Any) -> Any:
    return broker._call(work, scaled(TIMEOUT_S))


def allow(broker: TestBroker, *acls: Acl) -> None:
    errors = call(broker, broker._running().service.acls.create_each(acls, caller=PEER))
    assert set(errors) == {None}


@pytest.fixture
def http(broker: TestBroker, context: ssl.SSLContext) -> Iterator[httpx.Client]:
    timeout_s = scaled(TIMEOUT_S)
    with httpx.Client(
        base_url=broker.http_url, verify=context, auth=ALICE, timeout=timeout_s, trust_env=False
    ) as client:
        yield client


@pytest.mark.row("A8")
def test_topics_over_http_are_those_that_the_user_may_describe(
    broker: TestBroker, http: httpx.Client
) -> None:
    assert http.get("/v1/topics").json()["topics"] == []
    refusals = []
    for name in (HIDDEN, "absent"):
        answers = http.get(f"/v1/topics/{name}"), http.delete(f"/v1/topics/{name}")
        assert [each.status_code for each in answers] == [403, 403]
        refusals.append([each.text.replace(name, "") for each in answers])
    assert refusals[0] == refusals[1]
    assert http.post("/v1/topics", json={"name": "new"}).status_code == 403
    assert http.patch(f"/v1/topics/{HIDDEN}", json={"partitions": 9}).status_code == 403

    allow(broker, acl(TOPIC, SEEN, Operation.DESCRIBE), acl(TOPIC, "new", Operation.CREATE))
    assert [each["name"] for each in http.get("/v1/topics").json()["topics"]] == [SEEN]
    found = http.get(f"/v1/topics/{SEEN}").json()
    assert (found["config"], len(found["partitions"])) == (None, 1), "settings need DESCRIBE_CONFIGS"
    created = http.post("/v1/topics", json={"name": "new"})
    assert created.status_code == 201
    nothing = dict.fromkeys(("id", "is_internal", "partitions", "config"))
    assert created.json() == {"name": "new", **nothing}, "it is created, and not to be described"
    assert "new" in broker._running().service.topics.state.topics
    allow(broker, acl(TOPIC, SEEN, Operation.DESCRIBE_CONFIGS))
    assert http.get(f"/v1/topics/{SEEN}").json()["config"] == {}


def test_metrics_and_details_of_health_need_the_cluster(broker: TestBroker, http: httpx.Client) -> None:
    allow(broker, acl(TOPIC, SEEN, Operation.ALL))
    refused = http.get("/metrics")
    assert refused.status_code == 403
    assert SEEN not in refused.text
    assert http.get("/health/ready").json() == {"ready": True}
    assert http.get("/health/live").json() == {"live": True}
    allow(broker, acl(CLUSTER, CLUSTER_NAME, Operation.DESCRIBE))
    assert HIDDEN in http.get("/metrics").text
    assert "disk" in http.get("/health/ready").json()


def test_topics_over_grpc_are_those_that_the_user_may_describe(
    broker: TestBroker, authority: Authority
) -> None:
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    options = [("grpc.use_local_subchannel_pool", 1)]
    port = broker.grpc_address.rpartition(":")[2]
    basic = "Basic " + base64.b64encode(":".join(ALICE).encode()).decode()
    with grpc.secure_channel(f"localhost:{port}", credentials, options) as channel:

        def ask(method: str, request: Any, answer: Any) -> Any:
            ask_one = channel.unary_unary(
                f"/mansio.v1.Mansio/{method}", type(request).SerializeToString, answer.FromString
            )
            return ask_one(request, metadata=(("authorization", basic),), timeout=scaled(TIMEOUT_S))

        for name in (HIDDEN, "absent"):
            with pytest.raises(grpc.RpcError) as refused:
                ask("DescribeTopic", pb.TopicName(name=name), pb.Topic)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        allow(broker, acl(TOPIC, SEEN, Operation.DESCRIBE), acl(TOPIC, "newer", Operation.CREATE))
        assert list(ask("ListTopics", pb.ListTopicsRequest(), pb.ListTopicsResponse).names) == [SEEN]
        found = ask("DescribeTopic", pb.TopicName(name=SEEN), pb.Topic)
        assert (len(found.partitions), dict(found.config)) == (1, {})
        created = ask("CreateTopic", pb.CreateTopicRequest(name="newer", partitions=1), pb.Topic)
        assert (created.name, created.id) == ("newer", b"")
