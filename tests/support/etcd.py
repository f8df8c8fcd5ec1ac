"""Real etcd servers on loopback, and a store on one of them that looks as if it were new.

Owns the processes and their data. Always true: an etcd that was started is healthy when `start` returns; it is stopped
by its own pid and is gone when `stop` or `kill` returns. Data lie in memory where the system has such a place, as no
test here cuts the power.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mansio.host.clock import HostRandom
from mansio.metadata.etcd.config import EtcdConfig
from mansio.metadata.etcd.store import EtcdStore
from mansio.metadata.metadata_store import Compare, Delete, Entry, Event, Listing, Put, TransactionResult
from support.machine import scaled
from support.paths import free_port, required_tool
from support.waiting import wait_until

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Iterator, Sequence

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 20.0
HTTP_DEADLINE_S = 15.0
MEMORY = Path("/dev/shm")


class Etcd:
    """One etcd process; it may be started again after `stop` or `kill`, with what it had."""

    def __init__(self, directory: Path, *, name: str = "one", arguments: Sequence[str] = ()) -> None:
        self.directory = directory / name
        self.name = name
        self.port, self.peer_port, self.metrics_port = free_port(), free_port(), free_port()
        self.arguments = list(arguments)
        self.initial_cluster = f"{name}={self.peer_url}"
        self.scheme = "http"
        self.tls: ssl.SSLContext | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def launch(self) -> None:
        """Start it without waiting: a member of several is healthy only with the others."""
        assert self._process is None, "already running"
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [required_tool("etcd"), "--name", self.name, "--data-dir", str(self.directory / "data")]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url]
        command += ["--initial-cluster", self.initial_cluster, "--logger", "zap", "--log-level", "warn"]
        command += ["--listen-metrics-urls", f"http://127.0.0.1:{self.metrics_port}", *self.arguments]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def start(self) -> Etcd:
        self.launch()
        self.wait_healthy()
        return self

    def wait_healthy(self) -> None:
        wait_until(self._healthy, START_DEADLINE_S, f"etcd {self.name} is healthy: {self.log()}")

    def _healthy(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"etcd has ended: {self.log()}"
        url = f"http://127.0.0.1:{self.metrics_port}/health"
        try:
            with urllib.request.urlopen(url, timeout=scaled(HTTP_DEADLINE_S)) as answer:
                return json.load(answer)["health"] == "true"
        except (OSError, ValueError):
            return False

    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL. Twice is harmless."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(scaled(STOP_DEADLINE_S))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(scaled(STOP_DEADLINE_S))

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def post(self, path: str, token: str = "", **body: Any) -> dict[str, Any]:
        """A call over etcd's HTTP gateway: what tests need and the client does not offer."""
        request = urllib.request.Request(f"{self.url}/v3/{path}", json.dumps(body).encode())
        if token:
            request.add_header("Authorization", token)
        with urllib.request.urlopen(request, timeout=scaled(HTTP_DEADLINE_S), context=self.tls) as answer:
            return dict(json.load(answer))

    def revision(self) -> int:
        answer = self.post("kv/range", key=base64.b64encode(b"\0").decode())
        return int(answer["header"]["revision"])

    def compact(self, revision: int) -> None:
        self.post("kv/compaction", revision=revision)


@contextmanager
def etcd_directory() -> Iterator[Path]:
    """Where etcd's data may lie; removed at the end."""
    path = tempfile.mkdtemp(prefix="mansio-etcd-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def one_etcd(*, arguments: Sequence[str] = ()) -> Iterator[Etcd]:
    """A single etcd, healthy."""
    with etcd_directory() as directory:
        etcd = Etcd(directory, arguments=arguments)
        try:
            yield etcd.start()
        finally:
            etcd.stop()


@contextmanager
def three_etcds() -> Iterator[list[Etcd]]:
    """Three members of one etcd, healthy."""
    with etcd_directory() as directory:
        members = [Etcd(directory, name=name) for name in ("one", "two", "three")]
        cluster = ",".join(f"{member.name}={member.peer_url}" for member in members)
        try:
            for member in members:
                member.initial_cluster = cluster
                member.launch()
            for member in members:
                member.wait_healthy()
            yield members
        finally:
            for member in members:
                member.stop()


@asynccontextmanager
async def etcd_store(*urls: str, **options: Any) -> AsyncIterator[EtcdStore]:
    """An open store, closed at the end."""
    watch_events_max = options.pop("watch_events_max", None)
    limits = {} if watch_events_max is None else {"watch_events_max": watch_events_max}
    store = await EtcdStore.open(EtcdConfig.create(urls, **options), HostRandom(), **limits)
    try:
        yield store
    finally:
        await store.close()


@dataclass
class AsNew:
    """A store under a prefix of its own whose revisions begin at 0, on an etcd that has been used before.

    It forgets changes older than `events_kept`, in which a cluster's etcd is told by its operator. Nobody else may
    change anything in that etcd meanwhile.
    """

    store: EtcdStore
    etcd: Etcd
    prefix: str
    base: int
    events_kept: int

    @property
    def operations_max(self) -> int:
        return self.store.operations_max

    async def get(self, key: str) -> Entry | None:
        found = await self.store.get(self.prefix + key)
        return found and self._entry(found)

    async def list(self, prefix: str) -> Listing:
        listing = await self.store.list(self.prefix + prefix)
        return Listing(listing.revision - self.base, [self._entry(entry) for entry in listing.entries])

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> TransactionResult:
        done = await self.store.transact(
            [self._compare(compare) for compare in compares],
            [operation._replace(key=self.prefix + operation.key) for operation in operations],
        )
        revision = done.revision - self.base
        if revision > self.events_kept and revision % (self.events_kept // 4) == 0:
            with suppress(urllib.error.HTTPError):  # it is done already
                self.etcd.compact(done.revision - self.events_kept)
        return TransactionResult(done.succeeded, revision)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Event]]:
        batches = self.store.watch(self.prefix + prefix, from_revision + self.base)
        try:
            async for batch in batches:
                yield [self._event(event) for event in batch]
        finally:
            await batches.aclose()  # type: ignore[attr-defined]  # the stores are async generators

    async def close(self) -> None:
        await self.store.close()

    def _compare(self, compare: Compare) -> Compare:
        modified, created = compare.mod_revision, compare.create_revision
        return Compare(
            self.prefix + compare.key, modified and modified + self.base, created and created + self.base
        )

    def _entry(self, entry: Entry) -> Entry:
        key = entry.key.removeprefix(self.prefix)
        return Entry(key, entry.value, entry.create_revision - self.base, entry.mod_revision - self.base)

    def _event(self, event: Event) -> Event:
        created = event.create_revision and event.create_revision - self.base
        key = event.key.removeprefix(self.prefix)
        return Event(key, event.value, created, event.mod_revision - self.base)


@asynccontextmanager
async def store_as_new(etcd: Etcd, directory: Path, events_kept: int) -> AsyncIterator[AsNew]:
    """`AsNew` on `etcd`; the same one again for the same `directory`. Its watches hold little."""
    note = directory / "as-new.json"
    if not note.exists():
        note.write_text(json.dumps([f"/as-new/{directory.name}-{free_port()}", etcd.revision()]))
    prefix, base = json.loads(note.read_text())
    async with etcd_store(etcd.url, watch_events_max=events_kept // 4) as store:
        yield AsNew(store, etcd, prefix, base, events_kept)
