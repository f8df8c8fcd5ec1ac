"""Network of a simulated cluster: delivers requests and responses, late, twice or not at all.

A `Link` is one TCP connection: what arrives on it arrives in order. What a network does to requests beyond that comes
by other connections: a frame that was held up arrives when its sender has long given up (`late`), or comes a second
time (`duplicate`); a link that lost something stays silent for good (`drop`).

On the broker's side stands the shipped connection (`api.kafka.connections.connection.Connection`) with another socket:
the same frames, backlog, order of answers and entry into the handlers.

Always true: bytes are carried as they are; nothing passes between two ends that are cut off from each other, in that
direction; what was sent before it was cut off arrives, or arrives when the cut is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.api.kafka.connections.connection import Connection
from mansio.broker.services.produce import PendingAppend, PendingProduce
from mansio.errors import BrokerUnreachable, ConnectionLost, RequestTimedOut
from mansio.net.broker_handshake import authenticate
from mansio.net.forwarded_requests import decode_forwarded, encode_forwarded
from mansio.ports import ConnectOutcome, LinkChange, complete
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce as produce_wire
from mansio.wire.codec import messages
from mansio.wire.field_values import ACKS_ALL
from mansio.wire.headers import read_request_header

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mansio.net.broker_handshake import BrokerCredentials
    from mansio.ports import ForwardedAnswer, ForwardedClient, Promise
    from mansio.testing.scheduler import SimulatedScheduler, Simulation
    from sim.brokers import SimulatedBroker

Source = int | str
"""A broker's number, or a client's name."""
_PRODUCES = (PendingAppend, PendingProduce)


class Network:
    """See the module. Rates are shares of frames."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.random = simulation.random
        self.brokers: dict[int, SimulatedBroker] = {}
        self.links: list[Link] = []
        self.cut: set[tuple[Source, Source]] = set()
        self.refusing: set[tuple[Source, Source]] = set()
        """Ways on which something in between refuses connects, and has ended the connections."""
        self.resetting: set[tuple[Source, Source]] = set()
        """The same, but connects are accepted, and reset afterwards."""
        self._down: set[Source] = set()
        """Machines without power: they do not answer."""
        self.late = 0.0
        self.duplicate = 0.0
        self.drop = 0.0
        self.slow = 1.0
        self.is_faithful: Callable[[bytes], bool] = lambda _: False
        """Whether a request between brokers, with its length, comes neither late nor twice."""
        self._held: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.counts: dict[str, int] = {}
        self._wires = simulation.scheduler("network")

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def delay_ms(self) -> float:
        return (0.1 + (1.2 - 0.1) * self.random.random()) * self.slow  # as `uniform` does, which is dearer

    def isolate(self, node_id: int) -> None:
        """From all other brokers; clients and etcd reach it."""
        for other in self.brokers:
            if other != node_id:
                self.cut |= {(node_id, other), (other, node_id)}

    def heal(self) -> None:
        """All ways are open and quick again; what was held back goes on."""
        self.late = self.duplicate = self.drop = 0.0
        self.slow = 1.0
        self.open_all()
        self.mend()

    def block(self, source: Source, target: Source, *, by_refusing: bool) -> None:
        """Something in between ends the connections from `source` to `target`, and takes no more."""
        (self.refusing if by_refusing else self.resetting).add((source, target))
        for link in self.links:
            if link.source == source and link.target == target:
                link.break_soon()

    def open_all(self) -> None:
        """Nothing in between refuses or resets connections any more."""
        self.refusing.clear()
        self.resetting.clear()

    def is_blocked(self, source: Source, target: Source) -> bool:
        return (source, target) in self.refusing or (source, target) in self.resetting

    def connect(
        self,
        source: Source,
        scheduler: SimulatedScheduler,
        target: int,
        answer: Callable[[ConnectOutcome], None],
    ) -> None:
        """Call `answer` on `scheduler` with what comes of a connect. A machine without power answers nothing, and
        neither does what cannot be reached; the kernel of a paused process accepts."""

        def reply(outcome: ConnectOutcome) -> None:
            scheduler.call_later(self.delay_ms(), answer, outcome)

        def arrive() -> None:
            broker = self.brokers.get(target)
            if target in self._down and (broker is None or broker.scheduler.stopped):
                return
            is_taken = broker is not None and not broker.scheduler.stopped and broker.listening
            outcome = ConnectOutcome.ACCEPTED if is_taken else ConnectOutcome.REFUSED
            self.carry(target, source, reply, outcome)

        def leave() -> None:
            self._wires.call_later(self.delay_ms(), arrive)

        if (source, target) in self.refusing:
            reply(ConnectOutcome.REFUSED)
        elif (source, target) in self.resetting:
            reply(ConnectOutcome.ACCEPTED)
        else:
            self.carry(source, target, leave)

    def mend(self) -> None:
        """No broker is cut off any more."""
        self.cut.clear()
        held, self._held = self._held, []
        for deliver, args in held:
            deliver(*args)

    def carry(self, source: Source, target: Source, deliver: Callable[..., object], *args: Any) -> None:
        """Now, or when the way is open again."""
        if self.cut and (source, target) in self.cut:
            self.count("held by a cut")
            self._held.append((deliver, args))
        else:
            deliver(*args)

    def link(self, source: Source, scheduler: SimulatedScheduler, target: int) -> Link:
        found = Link(self, source, scheduler, target)
        self.links.append(found)
        return found

    def died(self, broker: SimulatedBroker, *, ends_connections: bool) -> None:
        """A process ended; unless its machine went with it, its kernel ends the connections."""
        (self._down.discard if ends_connections else self._down.add)(broker.node_id)
        for link in self.links:
            if link.served_by is broker and ends_connections:
                link.end_soon()
        self.links = [link for link in self.links if not link.closed and link.source != broker.node_id]


class Link:
    """One connection to a broker, seen from who made it. Frames come whole, without their length."""

    def __init__(self, network: Network, source: Source, scheduler: SimulatedScheduler, target: int) -> None:
        self._network = network
        self.source = source
        self.target = target
        self._scheduler = scheduler
        self.served_by: SimulatedBroker | None = None
        self._far: SimulatedConnection | None = None
        self._silent = False
        self._there_ms = self._back_ms = 0.0
        self._received = bytearray()
        self.closed = False
        self.copy_of: Link | None = None
        """Of a connection that carries what was sent on another one: that one. It has the same sender."""
        self.faithful = False
        """Nothing comes late or twice: for requests that carry no number by which a repeat is known."""
        self.is_unordered = False
        """Requests on it are executed at the same time: one that is late or lost delays no other one."""
        self.on_frame: Callable[[bytes], None] = lambda _: None
        self.on_lost: Callable[[], None] = lambda: None

    def send(self, data: bytes) -> None:
        """One frame, with its length."""
        network, random = self._network, self._network.random
        if self.closed or self._silent:
            return
        if network.drop and random.random() < network.drop:
            network.count("drop")
            self._silent = not self.is_unordered or random.random() < 0.5
            return
        if network.duplicate and not self.faithful and random.random() < network.duplicate:
            network.count("duplicate")
            self._ghost(data, random.uniform(1, 4000))
        if network.late and not self.faithful and random.random() < network.late:
            network.count("late")
            delay_ms = random.uniform(300, 6000)
            if self.is_unordered:
                network._wires.call_later(delay_ms, self.send_surely, data)
            else:
                self._silent = True
                self._ghost(data, delay_ms)
            return
        network.carry(self.source, self.target, self._leave, data)

    def _ghost(self, data: bytes, delay_ms: float) -> None:
        """The same bytes by another connection, whose answers are not read."""
        ghost = Link(self._network, self.source, self._network._wires, self.target)
        ghost.copy_of = self
        self._network._wires.call_later(delay_ms, ghost.send_surely, data)

    def send_surely(self, data: bytes) -> None:
        if self.closed:
            return
        self._network.carry(self.source, self.target, self._leave, data)

    def _leave(self, data: bytes) -> None:
        broker = self._network.brokers.get(self.target)
        now = self._network.simulation.now_ms
        self._there_ms = max(self._there_ms, now + self._network.delay_ms())
        if (
            broker is None
            or broker.scheduler.stopped
            or not broker.listening
            or self._network.is_blocked(self.source, self.target)
        ):
            self.end_soon()
        else:
            broker.scheduler.call_later(self._there_ms - now, self._arrive, broker, data)

    def _arrive(self, broker: SimulatedBroker, data: bytes) -> None:
        if self.served_by is None:
            if not broker.listening:
                self.end_soon()
                return
            self.served_by = broker
            self._far = SimulatedConnection(broker, self)
            if self.copy_of is not None and self.copy_of._far is not None:
                self._far.peer = self.copy_of._far.peer
        if self.served_by is not broker or self._far is None or self._far.closed:
            self.end_soon()
            return
        self._far.take(data)

    def answer(self, data: bytes) -> None:
        """The broker sends this."""
        if self._silent:
            return
        self._network.carry(self.target, self.source, self._return, data)

    def _return(self, data: bytes) -> None:
        now = self._network.simulation.now_ms
        self._back_ms = max(self._back_ms, now + self._network.delay_ms())
        self._scheduler.call_later(self._back_ms - now, self._receive, data)

    def _receive(self, data: bytes) -> None:
        if self.closed:
            return
        if not self._received and len(data) == 4 + int.from_bytes(data[:4], "big"):
            self.on_frame(data[4:])
            return
        self._received += data
        while len(self._received) >= 4:
            size = int.from_bytes(self._received[:4], "big")
            if len(self._received) < 4 + size:
                return
            frame = bytes(self._received[4 : 4 + size])
            del self._received[: 4 + size]
            self.on_frame(frame)

    def end_soon(self) -> None:
        """The other side is gone, and its connection ends."""
        if not self._silent and not self.closed:
            self._network.carry(self.target, self.source, self._call_later, self._scheduler, self._lost)

    def break_soon(self) -> None:
        """Something in between ends it for both sides."""
        self.end_soon()
        far = self._far
        if far is not None and self.served_by is not None:
            self._call_later(self.served_by.scheduler, far.end)

    def _lost(self) -> None:
        if not self.closed:
            self.closed = True
            self.on_lost()

    def close(self) -> None:
        """By who made it."""
        self.closed = True
        far = self._far
        if far is not None and self.served_by is not None and not self._silent:
            self._network.carry(self.source, self.target, self._call_later, self.served_by.scheduler, far.end)

    def _call_later(self, scheduler: SimulatedScheduler, what: Callable[[], None]) -> None:
        scheduler.call_later(self._network.delay_ms(), what)


class _Transport:
    """What a connection asks of its socket."""

    def __init__(self, connection: SimulatedConnection) -> None:
        self._connection = connection
        self.paused = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False
        self._connection.broker.scheduler.call_soon(self._connection.go_on)

    def abort(self) -> None:
        self._connection.link.end_soon()
        self._connection.broker.scheduler.call_soon(self._connection.end)

    close = abort


class _Egress:
    """The way out: everything leaves at once."""

    waiting_bytes = held_bytes = waiting_parts = 0
    descriptor = -1

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, pieces: Sequence[Any]) -> None:
        whole = b"".join(piece if isinstance(piece, bytes) else piece.read() for piece in pieces)
        if whole:
            self._link.answer(whole)

    def close(self) -> None:
        """Nothing is held."""


class SimulatedConnection(Connection):
    """The shipped connection of a broker, on a link."""

    __slots__ = ("_acks", "_ended", "_inbox", "_version", "_versions", "broker", "link")

    def __init__(self, broker: SimulatedBroker, link: Link) -> None:
        super().__init__(broker.server, broker.server.inter_broker_listener)
        self.broker = broker
        self.link = link
        self._inbox = bytearray()
        self._version = self._acks = 0
        self._versions: dict[Any, tuple[int, int]] = {}
        """Version and acks of the request of each response."""
        self._ended = False
        self._transport = _Transport(self)  # type: ignore[assignment]
        self._socket_writer = _Egress(link)  # type: ignore[assignment]
        self.client_host = str(link.source)
        self.last_active = broker.server.now
        broker.server.on_connected(self)

    def take(self, data: bytes) -> None:
        self._inbox += data
        self.go_on()

    def go_on(self) -> None:
        """As the loop of a socket does: read while reading is on."""
        inbox, transport = self._inbox, self._transport
        while inbox and not self.closed and not transport.paused:  # type: ignore[union-attr]
            room: Any = self.get_buffer(-1)
            size = min(len(room), len(inbox))
            room[:size] = inbox if size == len(inbox) else inbox[:size]
            del inbox[:size]
            self.buffer_updated(size)

    def _begin(self, frame: memoryview) -> None:
        self._version = int.from_bytes(frame[2:4], "big")
        if int.from_bytes(frame[:2], "big") == ApiKey.PRODUCE:
            body = read_request_header(frame).body_position
            self._acks = produce_wire.decode_request(self._version, frame, body).acks
        super()._begin(frame)

    def queue_response(self, response: Any) -> None:
        self._versions[response] = self._version, self._acks
        super().queue_response(response)

    def queue_exclusive_response(self, response: Any) -> None:
        self._versions[response] = self._version, self._acks
        super().queue_exclusive_response(response)

    def on_response_complete(self, slot: Any) -> None:
        version, acks = self._versions.pop(slot, (0, 0))
        if isinstance(slot, _PRODUCES) and slot.response and acks == ACKS_ALL:
            # Responses with other acks wait only for the file of the log to be opened.
            self.broker.confirms(version, bytes(slot.response[0]))
        super().on_response_complete(slot)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self.connection_lost(None)


class SimulatedPeers:
    """`mansio.ports.ForwardingPeers` of one broker for one class of requests: one link to each other broker, opened
    when needed, on which both authenticate as on a real connection.

    On an unordered link many requests are in flight. One that times out leaves the link open, unless nothing was
    received since it was sent; its late response is discarded.
    """

    def __init__(
        self,
        broker: SimulatedBroker,
        knows: Callable[[int], bool],
        credentials: BrokerCredentials,
        *,
        is_unordered: bool,
        on_link_change: Callable[[int, LinkChange], None] = lambda _, __: None,
    ) -> None:
        self._on_link_change = on_link_change
        self._broker = broker
        self._knows = knows
        self._credentials = credentials
        self._is_unordered = is_unordered
        self._links: dict[int, _PeerLink] = {}
        self._opening: dict[int, list[Promise[None]]] = {}
        self._count = 0

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        """See `mansio.ports.Peers`."""
        return await self._exchange(await self._usable(node_id, timeout_ms), request, timeout_ms)

    def is_open(self, node_id: int) -> bool:
        """See `mansio.ports.PeerLinks`."""
        found = self._links.get(node_id)
        return (
            found is not None
            and not found.link.closed
            and found.broker_epoch == self._credentials.broker_epoch()
        )

    async def open(self, node_id: int, *, timeout_ms: float) -> None:
        """See `mansio.ports.PeerLinks`."""
        await self._usable(node_id, timeout_ms)

    async def _usable(self, node_id: int, timeout_ms: float) -> _PeerLink:
        if not self._knows(node_id):
            raise BrokerUnreachable(f"broker {node_id} is not there")
        while (waiters := self._opening.get(node_id)) is not None:
            opened: Promise[None] = self._broker.scheduler.promise()
            waiters.append(opened)
            await opened
        found = self._links.get(node_id)
        if found is None or found.link.closed or found.broker_epoch != self._credentials.broker_epoch():
            if found is not None:
                found.close("the broker registered again")
            self._opening[node_id] = []
            try:
                found = await self._open(node_id, timeout_ms)
            finally:
                for each in self._opening.pop(node_id):
                    each.set_result(None)
        return found

    async def forward(
        self, node_id: int, request: bytes, *, client: ForwardedClient, is_own: bool, timeout_ms: float
    ) -> ForwardedAnswer:
        """See `mansio.ports.ForwardingPeers`."""
        identity = self._credentials.identity()
        framed = encode_forwarded(identity, request, client=client, is_own=is_own)
        return decode_forwarded(await self.send(node_id, framed, timeout_ms=timeout_ms), node_id)

    async def _open(self, node_id: int, timeout_ms: float) -> _PeerLink:
        identity = self._credentials.identity()
        network, scheduler = self._broker.world.network, self._broker.scheduler
        opened = _PeerLink(network.link(self._broker.node_id, scheduler, node_id), identity.broker_epoch)

        async def exchange(api_key: ApiKey, fields: Mapping[str, Any]) -> Any:
            version = int(self._is_unordered and api_key == ApiKey.AUTHENTICATE_BROKER)
            request = messages.encode_request(api_key, version, 0, "broker", fields)
            frame = await self._exchange(opened, request, timeout_ms)
            return messages.decode_response_frame(api_key, version, frame)[1]

        try:
            await authenticate(exchange, self._credentials, identity, node_id)
        except BaseException:
            opened.close("no handshake")
            raise
        opened.link.is_unordered = self._is_unordered
        self._links[node_id] = opened
        opened.tell(self._on_link_change)
        return opened

    async def _exchange(self, to: _PeerLink, request: bytes, timeout_ms: float) -> bytes:
        scheduler = self._broker.scheduler
        self._count += 1
        number = self._count.to_bytes(4, "big")
        promise = to.waiting[number] = scheduler.promise()
        received = to.received

        def late() -> None:
            if not promise.done():
                promise.set_exception(RequestTimedOut(f"broker {to.link.target}"))

        timer = scheduler.call_later(timeout_ms, late)
        done = False
        try:
            to.link.faithful = self._broker.world.network.is_faithful(request)
            to.link.send(request[:8] + number + request[12:])
            answer = await promise
            done = True
            return answer
        finally:
            timer.cancel()
            to.waiting.pop(number, None)
            if not done and (not self._is_unordered or to.received == received):
                to.close("it is silent")


class _PeerLink:
    """A link to another broker, the requests in flight on it, and the broker epoch with which it was opened."""

    def __init__(self, link: Link, broker_epoch: int) -> None:
        self.link = link
        self.broker_epoch = broker_epoch
        self.waiting: dict[bytes, Promise[bytes]] = {}
        self.received = 0
        """Number of frames received."""
        self._on_link_change: Callable[[int, LinkChange], None] | None = None
        link.on_frame = self._on_frame
        link.on_lost = self._on_lost

    def _on_frame(self, frame: bytes) -> None:
        self.received += 1
        promise = self.waiting.get(frame[:4])
        if promise is not None and not promise.done():
            promise.set_result(frame)

    def tell(self, on_link_change: Callable[[int, LinkChange], None]) -> None:
        """Both sides have authenticated: tell that it is open, and what becomes of it."""
        on_link_change(self.link.target, LinkChange.OPENED)
        self._on_link_change = on_link_change

    def _on_lost(self) -> None:
        self._end("the connection ended", LinkChange.LOST)

    def close(self, reason: str) -> None:
        self.link.close()
        self._end(reason, LinkChange.CLOSED)

    def _end(self, reason: str, change: LinkChange) -> None:
        for promise in self.waiting.values():
            if not promise.done():
                promise.set_exception(ConnectionLost(f"broker {self.link.target}: {reason}"))
        on_link_change, self._on_link_change = self._on_link_change, None
        if on_link_change is not None:
            on_link_change(self.link.target, change)


class SimulatedPeerLinks:
    """`mansio.ports.PeerLinks` of one broker."""

    def __init__(self, broker: SimulatedBroker, hand_over_peers: Callable[[], SimulatedPeers]) -> None:
        self._broker = broker
        self._hand_over_peers = hand_over_peers
        self._callbacks: list[Callable[[int, LinkChange], None]] = []

    def on_link_change(self, callback: Callable[[int, LinkChange], None]) -> None:
        self._callbacks.append(callback)

    def handle_link_change(self, node_id: int, change: LinkChange) -> None:
        """Something happened to a connection of any class."""
        for callback in self._callbacks:
            callback(node_id, change)

    def is_open(self, node_id: int) -> bool:
        return self._hand_over_peers().is_open(node_id)

    async def open(self, node_id: int, *, timeout_ms: float) -> None:
        await self._hand_over_peers().open(node_id, timeout_ms=timeout_ms)

    async def try_connect(self, node_id: int, *, timeout_ms: float) -> ConnectOutcome:
        broker = self._broker
        promise: Promise[ConnectOutcome] = broker.scheduler.promise()
        broker.world.network.connect(
            broker.node_id, broker.scheduler, node_id, lambda outcome: complete(promise, outcome)
        )
        timer = broker.scheduler.call_later(timeout_ms, complete, promise, ConnectOutcome.UNKNOWN)
        try:
            return await promise
        finally:
            timer.cancel()
