"""Metrics, health and admin clients of a cluster while a broker is dead, hangs or was down. All tests share one
cluster; each restores every broker."""

from __future__ import annotations

import itertools
import time
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from prometheus_client.parser import text_string_to_metric_families

from mansio import MansioError, blocking
from mansio.client import ProducerOptions
from mansio.wire.api_versions import ApiKey
from support.cluster import cluster
from support.documents import metrics_of_a_cluster
from support.machine import scaled
from support.paths import ROOT
from support.raw_peer import RawPeer
from support.readiness import readiness
from system.cluster.load import create_topic, say
from system.cluster.prober import OK, Prober

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.cluster import Cluster

pytestmark = pytest.mark.full

SESSION_MS = 6000
"""Long enough to look around while a dead broker is still listed, on a machine that is busy."""

numbers = itertools.count()


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(
        tmp_path_factory.mktemp("seen"),
        http=True,
        broker_session_timeout_ms=SESSION_MS,
        broker_hand_over_enable=False,  # a dead broker stays listed for a while
        replica_lag_time_max_ms=2000,
        group_initial_rebalance_delay_ms=0,
        offsets_topic_num_partitions=6,
    ) as one:
        yield one


@pytest.fixture
def one(joined: Cluster) -> Cluster:
    away = [node_id for node_id in joined.brokers if node_id not in joined.running]
    if away:
        joined.start(*away)
    joined.wait(lambda: len(joined.sessions()) == 3, "every broker has a session")
    return joined


def new_topic(one: Cluster, **config: Any) -> str:
    topic = f"seen-{next(numbers)}"
    create_topic(one, topic, **config)
    return topic


def scrape(one: Cluster, node_id: int) -> dict[str, float]:
    """Every sample about the cluster, by name and labels."""
    with urllib.request.urlopen(f"{one.brokers[node_id].http_url}/metrics", timeout=scaled(10)) as answer:
        text = answer.read().decode()
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrapes(one: Cluster) -> list[dict[str, float]]:
    """Of each broker that runs."""
    return [scrape(one, node_id) for node_id in one.running]


def health(one: Cluster, node_id: int) -> dict[str, Any]:
    return readiness(one.brokers[node_id].http_url)


def reported(shown: dict[str, Any], kind: str) -> set[str]:
    return {one["reason"] for one in shown[kind]}


def alone_in_etcd(one: Cluster, node_id: int) -> set[str]:
    """Partitions with other replicas that this broker leads and with no other replica in sync."""
    places = [place for topic in one.entries("topics/") for place in one.places(topic)]
    return {
        f"{place.topic}-{place.index}"
        for place in places
        if place.leader == node_id and place.in_sync == (node_id,) and len(place.replicas) > 1
    }


def alone_as_reported(one: Cluster, node_id: int) -> tuple[set[str], int]:
    """Those that its health names, and how many it speaks of."""
    for warning in health(one, node_id)["warnings"]:
        if warning["reason"] == "under_min_isr":
            named, _, more = warning["detail"].rpartition(": ")[2].partition(" and ")
            names = set(named.split(", "))
            return names, len(names) + int(more.removesuffix(" more") or 0)
    return set(), 0


def test_every_metric_of_the_document_is_shown_by_a_broker_of_a_cluster(one: Cluster) -> None:
    """But for those of an etcd member that the broker looks after itself: it has none here."""
    topic = new_topic(one)
    named = metrics_of_a_cluster((ROOT / "docs/how-to/operations.md").read_text())
    assert len(named) > 10

    def missing() -> set[str]:
        shown = {name.partition("[")[0] for leader in one.brokers for name in scrape(one, leader)}
        return {name for name in named - shown if not name.startswith("mansio_etcd_member_")}

    one.wait(lambda: one.leader(topic) in one.brokers and not missing(), "all of them are shown")


@pytest.mark.row("C5")
def test_numbers_and_health_tell_of_a_dead_broker_and_of_its_return(one: Cluster) -> None:
    topic = new_topic(one)
    prober = Prober(one, topic)
    dead = one.leader(topic)
    prober.until(dead, {OK})
    one.wait(lambda: sum(value["mansio_controller_active"] for value in scrapes(one)) == 1, "one decides")
    one.wait(lambda: all(value["mansio_brokers"] == 3 for value in scrapes(one)), "each sees all")
    before = dict(zip(one.running, scrapes(one), strict=True))
    for numbers_of in before.values():
        assert numbers_of["mansio_session_held"] == 1
        assert numbers_of["mansio_offline_partitions"] == 0
        assert 0 <= numbers_of["mansio_session_renewal_age_seconds"] < SESSION_MS / 1000
        assert numbers_of["mansio_etcd_calls_total"] > 0
    assert sum(numbers_of["mansio_leader_partitions"] for numbers_of in before.values()) >= 1
    assert before[dead]["mansio_leader_partitions"] >= 1

    one.kill(dead)
    one.wait_led_by_others([topic], dead, 30)
    prober.until(one.leader(topic), {OK})
    leader = one.leader(topic)
    one.wait(lambda: scrape(one, leader)["mansio_under_replicated_partitions"] >= 1, "it is told")
    one.wait(lambda: all(value["mansio_brokers"] == 2 for value in scrapes(one)), "each sees that it is gone")
    found = dict(zip(one.running, scrapes(one), strict=True))
    assert found[leader]["mansio_under_min_isr_partitions"] == 0
    lag = f"mansio_follower_lag_seconds[{dead}]"
    one.wait(lambda: scrape(one, leader)[lag] > found[leader][lag] + 0.5, "the dead one lags more and more")
    elected = sum(numbers_of["mansio_leader_elections_total[leader_failed]"] for numbers_of in found.values())
    assert elected >= 1
    assert health(one, leader)["ready"]

    one.start(dead)
    one.wait_in_sync(topic)
    one.wait(lambda: scrape(one, leader)["mansio_under_replicated_partitions"] == 0, "all is in sync")
    grown = scrape(one, leader)
    assert grown["mansio_isr_expansions_total"] > before[leader]["mansio_isr_expansions_total"]
    one.wait(lambda: not health(one, dead)["warnings"], "the one that was dead has nothing to complain of")


@pytest.mark.row("C2")
def test_followers_fetch_in_sessions_which_end_with_them(one: Cluster) -> None:
    topic = new_topic(one)
    one.wait_in_sync(topic)
    leader = one.leader(topic)
    dead = next(node_id for node_id in one.running if node_id != leader)

    def sessions() -> int:
        return round(scrape(one, leader)["mansio_incremental_fetch_sessions"])

    one.wait(lambda: sessions() >= 2, "both followers have one")
    before = scrape(one, leader)
    assert before["mansio_incremental_fetch_partitions_cached"] >= 2
    prober = Prober(one, topic)
    prober.until(leader, {OK})
    one.kill(dead)
    one.wait(lambda: sessions() == 1, "the session of the dead one has ended")
    one.start(dead)
    one.wait_in_sync(topic)
    one.wait(lambda: sessions() == 2, "it has another one")
    prober.until(leader, {OK})
    evictions = "mansio_incremental_fetch_session_evictions_total"
    assert scrape(one, leader)[evictions] == before[evictions]


@pytest.mark.row("C2", "C5")
def test_leader_without_its_followers_reports_it_to_clients_in_its_numbers_and_in_its_health(
    one: Cluster,
) -> None:
    topic = new_topic(one)
    prober = Prober(one, topic)
    leader, followers = one.leader(topic), one.followers(topic)
    prober.until(leader, {OK})
    for follower in followers:
        one.kill(follower)
    one.wait(lambda: one.place(topic).in_sync == (leader,), "nobody else is in sync", 30)
    options = ProducerOptions(delivery_timeout_ms=3000)
    with (
        blocking.connect(one.brokers[leader].bootstrap_servers, producer=options) as client,
        pytest.raises(MansioError) as refused,
    ):
        client.publish(topic, b"for nobody")
    assert "min.insync.replicas=2" in str(refused.value), refused.value

    def reported_as_it_is() -> bool:
        """The dead ones' partitions come to the one that is left when their sessions end: more than it names."""
        short = alone_in_etcd(one, leader)
        named, count = alone_as_reported(one, leader)
        counted = scrape(one, leader)["mansio_under_min_isr_partitions"]
        return f"{topic}-0" in short and named <= short and count == counted == len(short)

    one.wait(reported_as_it_is, "its numbers and its health tell of each partition that it leads alone")
    assert health(one, leader)["ready"], "it still answers readers"
    one.wait(lambda: "partition_under_min_isr" in one.brokers[leader].text(), "so does its log")
    one.start(*followers)
    one.wait_in_sync(topic)
    prober.until(leader, {OK}, 30)
    one.wait(lambda: "under_min_isr" not in reported(health(one, leader), "warnings"), "it is over")


@pytest.mark.row("C5")
def test_broker_that_etcd_does_not_answer_is_degraded_and_then_not_ready_until_it_is_back(
    one: Cluster,
) -> None:
    topic = new_topic(one)
    (member,) = one.members
    member.pause()
    try:
        seen: set[str] = set()

        def not_ready() -> bool:
            shown = health(one, 1)
            seen.update(reported(shown, "warnings"))
            return "session_not_held" in reported(shown, "reasons")

        one.wait(not_ready, "it is not ready", 20)
    finally:
        member.resume()
    assert "etcd_unresponsive" in seen
    one.wait(lambda: all(health(one, node_id)["ready"] for node_id in one.brokers), "all are ready again")
    one.wait_in_sync(topic)


@pytest.mark.row("C5")
@pytest.mark.parametrize("victim", ["the controller", "another"])
def test_admin_clients_go_on_at_once_while_a_dead_broker_is_still_listed(one: Cluster, victim: str) -> None:
    """librdkafka waits for the controller that it knows: for the whole time of its request, if that is dead."""
    controller = one.controller()
    dead = controller if victim == "the controller" else next(n for n in one.brokers if n != controller)
    alive = next(node_id for node_id in one.brokers if node_id not in (dead, controller))
    one.kill(dead)
    began = time.monotonic()
    admin = AdminClient({"bootstrap.servers": one.brokers[alive].bootstrap_servers, "log_level": 0})
    name = f"seen-{next(numbers)}"
    try:
        (made,) = admin.create_topics([NewTopic(name, 1, 3)], request_timeout=scaled(20)).values()
        made.result(scaled(25))
    except KafkaException as error:
        raise AssertionError(f"{error} after {time.monotonic() - began:.1f} s") from error
    took_s = time.monotonic() - began
    listed = dead in one.sessions()
    say("topic made while a broker is dead", victim=victim, took_s=took_s, still_listed=listed)
    assert listed, "it does not wait for the session of the dead one"


def coordinator_of_some(one: Cluster, groups: list[str]) -> int:
    """A broker that coordinates some of these, and not all; 0: none does."""
    with RawPeer(one.brokers[1].kafka_port) as peer:
        fields = {"key": "", "key_type": 0, "coordinator_keys": groups}
        found = Counter(each.node_id for each in peer.call(ApiKey.FIND_COORDINATOR, 4, fields).coordinators)
    return next((node_id for node_id in one.brokers if 0 < found[node_id] < len(groups)), 0)


@pytest.mark.row("C5")
def test_groups_are_listed_and_described_while_a_dead_broker_is_still_listed(one: Cluster) -> None:
    topic = new_topic(one)
    groups = [f"g-{next(numbers)}" for _ in range(6)]
    with blocking.connect(one.bootstrap_servers) as client:
        for group in groups:
            client.admin.reset_offsets(group, [topic], to="latest")
        listed = client.admin.list_groups()
        assert listed.is_complete
        assert {each.group_id for each in listed} >= {*groups}
    dead = one.wait(lambda: coordinator_of_some(one, groups), "they have several coordinators", 90)
    with blocking.connect(one.bootstrap_servers) as client:
        client.admin.list_groups()  # on a busy machine the first connections alone take most of the time there is below
        one.kill(dead)
        began = time.monotonic()
        found = client.admin.list_groups(timeout_ms=1500)
        took_s = time.monotonic() - began
        assert dead in one.sessions(), "else there is nothing to see here"
        assert found.unreachable == (dead,)
        assert found.missing_partitions, "those that the dead broker leads"
        assert 0 < len(found) < len(groups), "those that the others coordinate"
        every = client.admin.list_groups()
        whole_s = time.monotonic() - began
        assert every.is_complete
        assert {listed.group_id for listed in every} >= {*groups}
        for group in groups:
            assert client.admin.describe_group(group).state == "Empty"
    say("groups listed while a broker is dead", partly_s=took_s, all_s=whole_s)


@pytest.mark.row("C5")
def test_topic_deleted_while_a_broker_was_away_leaves_nothing_on_its_disk(one: Cluster) -> None:
    deleted, kept = new_topic(one), new_topic(one)
    away = one.brokers[2]
    topics = away.data / "topics"
    for topic in (deleted, kept):  # replicas of a new topic are in sync before they have made a directory
        one.wait(lambda topic=topic: [*topics.glob(f"{topic}.*")], f"{topic} is on the disk of broker 2")
    one.kill(2)
    with blocking.connect(one.brokers[1].bootstrap_servers) as client:
        client.admin.delete_topic(deleted)
    one.start(2)
    one.wait(lambda: not [*away.data.glob(f"*/{deleted}.*")], "it is removed")
    assert [*topics.glob(f"{kept}.*")]
    assert not (away.data / "quarantine").exists()
    one.wait_in_sync(kept)
