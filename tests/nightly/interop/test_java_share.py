"""Share groups as Java's own `KafkaShareConsumer` uses them: version 2 of ShareFetch and ShareAcknowledge, with renewed
leases (KIP-1222) and exactly as many records as were asked for (KIP-1206), which no other stock client speaks yet.

Nightly: needs a JDK and Maven. Always true: a member is a process that answers every line within a deadline, or the
test fails; it is gone when the test ends.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.share_fetch import RECORD_LIMIT, decode_request
from mansio.wire.headers import read_request_header
from nightly.interop.java_client import Conversation, compiled
from support.machine import scaled
from support.paths import free_port
from support.process import served
from support.recording_proxy import recording
from system.interop.conftest import ARGUMENTS, create_topic
from system.interop.share_members import Given
from system.interop.test_share_groups import alter, offsets, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from support.recording_proxy import RecordingProxy

pytestmark = pytest.mark.timeout(900)

DEADLINE_S = 60.0
LOCK_MS = 8_000


class JavaMember(Conversation):
    """See the module."""

    def __init__(
        self, command: list[str], bootstrap_servers: str, group: str, topic: str, settings: dict[str, object]
    ) -> None:
        config = {
            "bootstrap.servers": bootstrap_servers,
            "group.id": group,
            "share.acknowledgement.mode": "explicit",
            **settings,
        }
        arguments = [f"{name}={value}" for name, value in config.items()]
        super().__init__([*command, topic, *arguments])

    def poll_once(self, wait_ms: int) -> list[Given]:
        found = [part.split(":", 3) for part in self.ask(f"poll {wait_ms}").split()]
        return [
            Given(int(partition), int(offset), value, int(deliveries))
            for partition, offset, deliveries, value in found
        ]

    def poll(self) -> list[Given]:
        """What the first poll gives that gives something."""
        end = time.monotonic() + scaled(DEADLINE_S)
        while time.monotonic() < end:
            if found := self.poll_once(500):
                return found
        raise AssertionError("no record came")

    def acknowledge(self, given: Sequence[Given], how: str) -> None:
        for each in given:
            self.ask(f"{each.partition} {each.offset} {how}")

    def commit(self) -> dict[str, str]:
        """Errors by partition, "-" for none."""
        return dict(part.split("=") for part in self.ask("commit").split())

    def commit_well(self) -> None:
        assert self.commit() == {"0": "-"}


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The member, compiled by the JDK that runs it: the command that starts it."""
    return compiled("JavaShareMember", tmp_path_factory.mktemp("classes"))


class Wire:
    """A broker behind a proxy that notes what is asked of it."""

    def __init__(self, bootstrap_servers: str, proxy: RecordingProxy) -> None:
        self.bootstrap_servers = bootstrap_servers
        self._proxy = proxy

    def versions(self, api: ApiKey) -> set[int]:
        return {one.version for one in self._proxy.requests if one.api_key == api}

    def acquire_modes(self, group: str) -> set[int]:
        """Of the requests of the group's members that wanted records."""
        modes = set()
        for one in self._proxy.requests:
            if one.api_key == ApiKey.SHARE_FETCH:
                frame = memoryview(one.frame)[4:]
                request = decode_request(one.version, frame, read_request_header(frame).body_position)
                modes |= (
                    {request.acquire_mode} if request.group_id == group and request.max_records else set()
                )
        return modes


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    port = free_port()
    arguments = [*ARGUMENTS, "--set", f"advertised_listeners=127.0.0.1:{port}"]
    data = tmp_path_factory.mktemp("java-share") / "data"
    with (
        served(data, arguments=arguments, http=False) as broker,
        recording(port, broker.kafka_port) as proxy,
    ):
        yield Wire(f"127.0.0.1:{port}", proxy)
        assert "Traceback" not in broker.text()
        assert broker.stop() == 0


@pytest.fixture
def java(command: list[str], wire: Wire, unique: str) -> Iterator[Callable[..., JavaMember]]:
    """Starts a member of the group, and of the topic, that have the test's name; gone at its end."""
    started: list[JavaMember] = []

    def start(**settings: object) -> JavaMember:
        config = {name.replace("_", "."): value for name, value in settings.items()}
        started.append(JavaMember(command, wire.bootstrap_servers, unique, unique, config))
        return started[-1]

    create_topic(wire.bootstrap_servers, unique)
    yield start
    for one in started:
        one.kill()


def drained(one: JavaMember, count: int) -> list[Given]:
    """So many, each accepted when it came."""
    found: list[Given] = []
    while len(found) < count:
        given = one.poll()
        one.acknowledge(given, "ACCEPT")
        one.commit_well()
        found += given
    return found


@pytest.mark.row("D1")
def test_javas_member_accepts_releases_and_rejects_in_version_2(
    java: Callable[..., JavaMember], wire: Wire, unique: str
) -> None:
    alter(wire.bootstrap_servers, unique, share_record_lock_duration_ms="60000")
    write(wire.bootstrap_servers, unique, [f"v{n}" for n in range(6)])
    one = java()
    given = one.poll()
    assert [each[1:] for each in given] == [(n, f"v{n}", 1) for n in range(6)]
    one.acknowledge(given[0::3], "ACCEPT")
    one.acknowledge(given[1::3], "RELEASE")
    one.acknowledge(given[2::3], "REJECT")
    one.commit_well()
    assert [each[1:] for each in drained(one, 2)] == [(n, f"v{n}", 2) for n in (1, 4)]
    write(wire.bootstrap_servers, unique, ["later"])
    assert offsets(one.poll()) == [6], "nothing else comes again"
    assert wire.versions(ApiKey.SHARE_FETCH) == {2}
    assert wire.versions(ApiKey.SHARE_ACKNOWLEDGE) == {2}


@pytest.mark.row("D2")
def test_javas_member_keeps_its_lease_as_long_as_it_renews_it(
    java: Callable[..., JavaMember], wire: Wire, unique: str
) -> None:
    alter(wire.bootstrap_servers, unique, share_record_lock_duration_ms=str(LOCK_MS))
    write(wire.bootstrap_servers, unique, ["a", "b", "c"])
    holder = java()
    held = holder.poll()
    assert offsets(held) == [0, 1, 2]
    assert holder.ask("lock") == str(LOCK_MS)
    other = java()
    end = time.monotonic() + 2 * LOCK_MS / 1000
    while time.monotonic() < end:
        holder.acknowledge(held, "RENEW")
        holder.commit_well()
        held = holder.poll()
        assert [(each.offset, each.deliveries) for each in held] == [(n, 1) for n in range(3)]
        assert other.poll_once(LOCK_MS // 8) == [], "they are leased"
    holder.acknowledge(held, "ACCEPT")
    holder.commit_well()
    holder.ask("close")  # it may have asked for more already
    write(wire.bootstrap_servers, unique, ["later"])
    assert offsets(other.poll()) == [3], "and then they are done"


@pytest.mark.row("D1")
def test_javas_member_gets_no_record_more_than_it_asked_for(
    java: Callable[..., JavaMember], wire: Wire, unique: str
) -> None:
    alter(wire.bootstrap_servers, unique, share_record_lock_duration_ms="60000")
    write(wire.bootstrap_servers, unique, [f"v{n}" for n in range(5)])
    limited = {"share_acquire_mode": "record_limit", "max_poll_records": 3}
    one, other = java(**limited), java(**limited)
    first = one.poll()
    assert offsets(first) == [0, 1, 2], "a batch of five is cut"
    second = other.poll()
    assert offsets(second) == [3, 4], "what is left of it is somebody else's"
    for member, given in ((one, first), (other, second)):
        member.acknowledge(given, "ACCEPT")
        member.commit_well()
    assert wire.acquire_modes(unique) == {RECORD_LIMIT}
