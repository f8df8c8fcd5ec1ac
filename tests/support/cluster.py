"""A real cluster on loopback: etcd and several `mansio serve`, each a process that can be killed, paused, cut off from
others and started again; and what etcd says about it, which is the truth.

Owns the processes, by their pids, and the network between them where a test asks for one. Always true: a cluster that
was started has a session for each broker; when the `with` block ends, none of its processes is left.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import threading
import time
import urllib.error
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mansio.config.settings import Settings
from mansio.wire.api_versions import ApiKey
from support.broker_network import ETCD, Network
from support.etcd import Etcd, etcd_directory
from support.paths import free_port
from support.process import ServedBroker
from support.raw_peer import RawPeer
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

CLUSTER_ID = "tested"
PREFIX = f"/mansio/{CLUSTER_ID}/"
FORMED_DEADLINE_S = 45.0
SETTLED_DEADLINE_S = 60.0
MEMBER_NAMES = ("one", "two", "three")


@dataclass(frozen=True, slots=True)
class Place:
    """One partition as etcd has it."""

    topic: str
    index: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


class Cluster:
    """See the module. Brokers have the numbers from 1 on."""

    def __init__(
        self,
        directory: Path,
        members: Sequence[Etcd],
        *,
        brokers: int,
        network: Network | None,
        settings: Mapping[str, Any],
        commands: Mapping[int, Sequence[str]],
        places: Mapping[int, Path],
        http: bool,
        sqs: bool,
        grpc: bool,
        broker_settings: Callable[[int, ServedBroker], Mapping[str, Any]] | None = None,
    ) -> None:
        self.directory = directory
        self.members = list(members)
        self.settings = {"cluster_id": CLUSTER_ID, "default_replication_factor": min(3, brokers), **settings}
        self.session_s = (
            settings.get("broker_session_timeout_ms", Settings().broker_session_timeout_ms) / 1000
        )
        """After which a broker that is not heard of is dead."""
        self._network = network
        self._broker_settings = broker_settings
        self.brokers: dict[int, ServedBroker] = {}
        self.sqs_urls: dict[int, str] = {}
        self.grpc_addresses: dict[int, str] = {}
        for node_id in range(1, brokers + 1):
            data = places.get(node_id, directory) / f"broker-{node_id}"
            broker = ServedBroker(data, command=commands.get(node_id), http=http)
            broker.output = directory / f"broker-{node_id}.log"
            broker.arguments = self._arguments(node_id, broker)
            if sqs:
                listener = f"127.0.0.1:{free_port()}"
                broker.arguments += ["--sqs", listener]
                self.sqs_urls[node_id] = f"http://{listener}"
            if grpc:
                self.grpc_addresses[node_id] = f"127.0.0.1:{free_port()}"
                broker.arguments += ["--grpc", self.grpc_addresses[node_id]]
            self.brokers[node_id] = broker

    def _arguments(self, node_id: int, broker: ServedBroker) -> list[str]:
        urls = [member.url for member in self.members]
        arguments = ["--node-id", str(node_id)]
        if self._network is not None:
            urls = [
                f"http://127.0.0.1:{self._network.listener(ETCD, member.port, caller=node_id)}"
                for member in self.members
            ]
            arguments += ["--advertise", f"127.0.0.1:{self._network.listener(node_id, broker.kafka_port)}"]
        arguments += ["--etcd", ",".join(urls)]
        own = {} if self._broker_settings is None else dict(self._broker_settings(node_id, broker))
        if (listeners := own.pop("listeners", None)) is not None:
            arguments += ["--kafka", listeners]  # the last one counts
        for name, value in {**self.settings, **own}.items():
            arguments += ["--set", f"{name}={value}"]
        return arguments

    @property
    def network(self) -> Network:
        assert self._network is not None, "made without one"
        return self._network

    @property
    def bootstrap_servers(self) -> str:
        """All brokers, also those that do not run."""
        return ",".join(broker.bootstrap_servers for broker in self.brokers.values())

    @property
    def running(self) -> list[int]:
        return [node_id for node_id, broker in self.brokers.items() if broker.running]

    def pids(self) -> dict[int, int]:
        return {node_id: self.brokers[node_id].pid for node_id in self.running}

    # The processes

    def start(self, *node_ids: int) -> None:
        """Start these, or all, at once; return when each is ready. Raises what kept one from that."""
        errors: list[BaseException] = []

        def start(broker: ServedBroker) -> None:
            try:
                broker.start()
            except BaseException as error:  # noqa: BLE001  # raised below, on the thread that waits
                errors.append(error)

        threads = [
            threading.Thread(target=start, args=(self.brokers[node_id],))
            for node_id in node_ids or self.brokers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def form(self, *first: int) -> None:
        """Start all, `first` before the others, and return when each of them sees all others."""
        for some in (first, self.brokers.keys() - first):
            if some:
                self.start(*some)
        self.wait(lambda: len(self.sessions()) == len(self.brokers), "every broker has a session")
        for node_id in self.brokers:
            self.wait(
                lambda node_id=node_id: self.seen_by(node_id) == set(self.brokers),
                f"broker {node_id} sees all",
            )

    def seen_by(self, node_id: int) -> set[int]:
        """The brokers of which this one informs its clients: it may learn of them later than etcd."""
        with RawPeer(self.brokers[node_id].kafka_port) as peer:
            return {broker.node_id for broker in peer.call(ApiKey.METADATA, 12, {"topics": []}).brokers}

    def kill(self, node_id: int) -> float:
        """SIGKILL; when it was."""
        moment = time.monotonic()
        self.brokers[node_id].kill()
        return moment

    def pause(self, node_id: int) -> float:
        """SIGSTOP; when it was."""
        self.brokers[node_id].signal(signal.SIGSTOP)
        return time.monotonic()

    def resume(self, node_id: int) -> None:
        self.brokers[node_id].signal(signal.SIGCONT)

    def forget_data(self, node_id: int) -> None:
        """The data directory is gone, as after the loss of a disk."""
        assert not self.brokers[node_id].running
        shutil.rmtree(self.brokers[node_id].data)

    def stop(self) -> None:
        """SIGKILL for whatever runs: a stop that is looked at is the business of a test."""
        for broker in self.brokers.values():
            if broker.running:
                broker.signal(signal.SIGCONT)
                broker.kill()

    def check_logs(self) -> None:
        """Nothing unexpected happened inside a broker."""
        for node_id, broker in self.brokers.items():
            text = broker.text() if broker.output.exists() else ""
            assert "Traceback" not in text, (
                f"broker {node_id}:\n{text[text.index('Traceback') - 2000 :][:6000]}"
            )

    # What etcd says

    def entries(self, prefix: str) -> dict[str, dict[str, Any]]:
        """Key without the prefix -> document, of everything under `PREFIX` + `prefix`."""
        found = {}
        for entry in self._listed(prefix):
            key = base64.b64decode(entry["key"]).decode().removeprefix(PREFIX + prefix)
            found[key] = json.loads(base64.b64decode(entry["value"]))
        return found

    def _listed(self, prefix: str) -> list[dict[str, str]]:
        start = (PREFIX + prefix).encode()
        end = start[:-1] + bytes([start[-1] + 1])
        wanted = {"key": base64.b64encode(start).decode(), "range_end": base64.b64encode(end).decode()}
        listed: list[dict[str, str]] = self._ask("kv/range", wanted).get("kvs", [])
        return listed

    def epoch(self, node_id: int) -> int:
        """The epoch of a broker's session."""
        (session,) = self._listed(f"brokers/{node_id}/session")
        return int(session["create_revision"])

    def put_entry(self, key: str, document: Mapping[str, Any]) -> None:
        """Write the key `PREFIX` + `key`."""
        value = json.dumps(document).encode()
        self._ask(
            "kv/put",
            {
                "key": base64.b64encode((PREFIX + key).encode()).decode(),
                "value": base64.b64encode(value).decode(),
            },
        )

    def delete_entry(self, key: str) -> None:
        """Delete the key `PREFIX` + `key`."""
        self._ask("kv/deleterange", {"key": base64.b64encode((PREFIX + key).encode()).decode()})

    def _ask(self, path: str, body: dict[str, str]) -> dict[str, Any]:
        last: Exception | None = None
        for member in self.members:
            try:
                return member.post(path, **body)
            except (OSError, urllib.error.URLError) as error:
                last = error
        raise AssertionError("no member of etcd answers") from last

    def sessions(self) -> set[int]:
        """The brokers whose session lives."""
        return {int(key.partition("/")[0]) for key in self.entries("brokers/") if key.endswith("/session")}

    def places(self, topic: str) -> list[Place]:
        """A topic's partitions; none when there is no such topic."""
        document = self.entries("topics/").get(topic)
        if document is None:
            return []
        found = self.entries(f"parts/{document['uuid']}/")
        return [_place(topic, int(index), found[index]) for index in sorted(found, key=int)]

    def place(self, topic: str, index: int = 0) -> Place:
        return self.places(topic)[index]

    def leader(self, topic: str, index: int = 0) -> int:
        return self.place(topic, index).leader

    def followers(self, topic: str, index: int = 0) -> list[int]:
        place = self.place(topic, index)
        return [node_id for node_id in place.replicas if node_id != place.leader]

    def controller(self) -> int:
        """The broker that decides for all; 0 while there is none."""
        return int(self.entries("controller").get("", {}).get("broker", 0))

    # Waiting

    def wait(self, condition: Callable[..., Any], what: str, deadline_s: float = FORMED_DEADLINE_S) -> Any:
        """`wait_until` that names what the brokers wrote when it was in vain."""
        try:
            return wait_until(condition, deadline_s, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tails()}") from None

    def tails(self, lines: int = 15) -> str:
        """The ends of all logs."""
        return "\n".join(
            f"--- broker {node_id} ({'runs' if broker.running else 'does not run'})\n"
            + "\n".join(broker.text().splitlines()[-lines:] if broker.output.exists() else ())
            for node_id, broker in self.brokers.items()
        )

    def wait_in_sync(self, *topics: str, deadline_s: float = SETTLED_DEADLINE_S) -> None:
        """Every replica is in sync, and every partition is led."""

        def settled() -> bool:
            found = [place for topic in topics for place in self.places(topic)]
            return bool(found) and all(
                place.leader > 0 and set(place.in_sync) == set(place.replicas) for place in found
            )

        self.wait(settled, f"all replicas of {', '.join(topics)} are in sync", deadline_s)

    def wait_led_by_others(self, topics: Iterable[str], node_id: int, deadline_s: float) -> None:
        """Everything that can be is led by another broker."""

        def moved() -> bool:
            return all(place.leader not in (node_id, -1) for topic in topics for place in self.places(topic))

        self.wait(moved, f"broker {node_id} leads nothing any more", deadline_s)


def _place(topic: str, index: int, document: Mapping[str, Any]) -> Place:
    return Place(
        topic,
        index,
        document["leader"],
        document["leader_epoch"],
        tuple(document["replicas"]),
        tuple(document["isr"]),
    )


@contextmanager
def cluster(
    directory: Path,
    *,
    brokers: int = 3,
    etcd_members: int = 1,
    with_network: bool = False,
    commands: Mapping[int, Sequence[str]] | None = None,
    places: Mapping[int, Path] | None = None,
    http: bool = False,
    sqs: bool = False,
    grpc: bool = False,
    broker_settings: Callable[[int, ServedBroker], Mapping[str, Any]] | None = None,
    first: Sequence[int] = (),
    **settings: Any,
) -> Iterator[Cluster]:
    """A cluster whose brokers have registered. `commands`: what runs instead of `mansio` for a broker; `places`: the
    directory its data is in, where not `directory`; `settings`: of every broker; `broker_settings`: of each one;
    `first`: brokers that are ready before the others start, so that they create the cluster."""
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        etcds = stack.enter_context(etcd_directory())
        members = [Etcd(etcds, name=name) for name in MEMBER_NAMES[:etcd_members]]
        names = ",".join(f"{member.name}={member.peer_url}" for member in members)
        for member in members:
            member.initial_cluster = names
            stack.callback(member.stop)
            member.launch()
        for member in members:
            member.wait_healthy()
        made: list[Cluster] = []
        network = (
            stack.enter_context(Network(lambda: made[0].pids() if made else {})) if with_network else None
        )
        one = Cluster(
            directory,
            members,
            brokers=brokers,
            network=network,
            settings=settings,
            commands=commands or {},
            places=places or {},
            http=http,
            sqs=sqs,
            grpc=grpc,
            broker_settings=broker_settings,
        )
        made.append(one)
        stack.callback(one.stop)
        one.form(*first)
        yield one


def on_same_processors() -> int:
    """How many processors all of it shares: figures say so."""
    return len(os.sched_getaffinity(0))
