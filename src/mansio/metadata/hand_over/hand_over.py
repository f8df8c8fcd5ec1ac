"""Early hand-over: ends the session of a killed broker before its lease ends, so that others take over at once.

    connection lost -> `Suspicions` -> connects -> confirmation of another broker -> one guarded transaction

Each broker keeps a connection to each other one open. `Suspicions` judges how connections end and how connects are
answered; what it accuses is executed here. The lease keeps its time: a broker that is paused, slow or cut off has its
session until then.

Invariants:
* The transaction deletes exactly the accused session, with the controller key if the broker held it. It requires that
  session, the registration and the controller key as this broker knows them, and the sessions of all witnesses, among
  them this broker.
* A broker whose session was deleted while it is running may believe in it until its deadline. It commits nothing, but
  it could still lease records and answer for groups. So the transaction puts a key that lives as long as the lease of
  that session (`Keys.ended_session`): while it exists, the next leaders of partitions lease nothing and answer for no
  group (`Partition.is_leadership_uncertain`). A running broker ends its lease when it learns that its session has ended
  (`BrokerLifecycle`).
* A suspicion costs at most `REFUSED_CONNECTS` connects, `CONFIRMERS_MAX` requests and `ATTEMPTS_MAX` transactions.

Model: Kafka has no such thing; a controlled shutdown deletes a session early, a killed broker is fenced after
broker.session.timeout.ms.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from mansio.errors import MansioError, error_for_code
from mansio.logs import fields
from mansio.metadata.feature_level import CURRENT_LEVEL
from mansio.metadata.hand_over.suspicions import REFUSED_CONNECTS, Suspicion, Suspicions
from mansio.metadata.metadata_store import (
    AmbiguousOutcome,
    Compare,
    Delete,
    Put,
    decode,
    encode,
    new_writer_id,
)
from mansio.metadata.model import BROKER_ACTIVE
from mansio.ports import ConnectOutcome, complete
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.metadata.hand_over.suspicions import Accusation
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.metadata.model import BrokerChange
    from mansio.metadata.session import Session
    from mansio.ports import Clock, LinkChange, PeerLinks, Peers, Promise, Random, Scheduler, Timer

logger = logging.getLogger(__name__)

CONNECT_INTERVAL_MS: Final = 100
"""Delay before each connect to a suspect: a process that is being killed closes its listener within this time."""
CONFIRMATION_INTERVAL_MS: Final = 20
"""Interval of the connects with which a broker confirms."""
CONNECT_TIMEOUT_MS: Final = 500
CONFIRMATION_TIMEOUT_MS: Final = 2000
CONFIRMERS_MAX: Final = 3
"""Maximum number of brokers that are asked, one after the other, until one confirms."""
CONFIRMATIONS_MAX: Final = 16
"""Maximum number of confirmations in progress; further requests are answered that nothing is confirmed."""
ATTEMPTS_MAX: Final = 3
LINK_RETRY_MS: Final = 1000
LINK_TIMEOUT_MS: Final = 5000
PING_FRACTION: Final = 0.5
"""Interval of the requests that keep connections open, as a fraction of the time of a lease. A connection without a
response is closed: its other end may be gone without a trace, after a loss of power."""
CLIENT_ID: Final = "mansio-hand-over"

HANDED_OVER: Final = "handed_over"
NOT_CONFIRMED: Final = "not_confirmed"
NOT_ENDED: Final = "not_ended"
EVENTS: Final = {
    HANDED_OVER: "session_ended_early",
    NOT_CONFIRMED: "hand_over_not_confirmed",
    NOT_ENDED: "hand_over_not_done",
}
"""Log event by outcome."""


class HandOver:
    """Early hand-over by one broker. `start` is called at most once; without it nothing is suspected or confirmed.
    `stop` may be called at any time. All methods are called on the event loop."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        state: MetadataImage,
        random: Random,
        links: PeerLinks,
        peers: Peers,
        scheduler: Scheduler,
        clock: Clock,
        node_id: int,
        session: Callable[[], Session | None],
        ttl_s: float,
    ) -> None:
        """`peers`: those of `RequestClass.HAND_OVER`. `session` returns the current session of this broker. `ttl_s` is
        the duration of a lease in seconds."""
        self._store = store
        self._state = state
        self._random = random
        self._links = links
        self._peers = peers
        self._scheduler = scheduler
        self._clock = clock
        self._node_id = node_id
        self._session = session
        self._suspicions = Suspicions(node_id, ttl_s)
        self._ping_ms = PING_FRACTION * ttl_s * 1000
        self._opening: set[int] = set()
        self._examined: set[Suspicion] = set()
        self._confirmations = 0
        self._waiting: Promise[None] | None = None
        self._work: list[Timer] = []
        self._is_running = False
        self.counts = dict.fromkeys((HANDED_OVER, NOT_CONFIRMED, NOT_ENDED), 0)
        """Number of suspicions with three refused connects, by outcome: the session was ended; no broker confirmed, or
        there were too few witnesses; the confirmed session was not ended by this broker, usually because another one
        was faster."""

    def start(self) -> None:
        """Open the connections to other brokers and keep them open."""
        self._is_running = True
        self._state.on_broker_change(self._handle_broker_change)
        self._links.on_link_change(self._handle_link_change)
        self._update()
        self._work.append(self._scheduler.spawn(self._keep_links(), name="keep connections to brokers open"))

    def stop(self) -> None:
        """Suspect no broker any more, and confirm nothing."""
        self._is_running = False
        for work in self._work:
            work.cancel()
        self._work.clear()

    def _update(self) -> None:
        epochs = {node_id: broker.epoch for node_id, broker in self._state.brokers.items()}
        active = [node_id for node_id, one in self._state.registrations.items() if one.state == BROKER_ACTIVE]
        self._suspicions.update(epochs, active, self._clock.monotonic())

    def _handle_broker_change(self, change: BrokerChange) -> None:
        del change
        self._update()
        self._wake()

    def _has_session(self) -> bool:
        session = self._session()
        return self._is_running and session is not None and session.is_valid(self._clock.monotonic())

    # ------------------------------------------------------------------ connections

    async def _keep_links(self) -> None:
        """Keep a connection to each broker that has a session. Without one, there would be no sign of its death."""
        ping_due_s = 0.0
        while True:
            missing = [
                node_id
                for node_id in self._state.brokers
                if node_id != self._node_id and not self._links.is_open(node_id)
            ]
            if self._has_session():
                for node_id in missing:
                    if node_id not in self._opening:
                        self._opening.add(node_id)
                        self._scheduler.spawn(self._open_link(node_id), name="open a connection to a broker")
            if (now_s := self._clock.monotonic()) >= ping_due_s:
                ping_due_s = now_s + self._ping_ms / 1000
                for node_id in self._state.brokers:
                    if node_id != self._node_id and node_id not in missing:
                        self._scheduler.spawn(self._ping(node_id), name="ping a broker")
            await self._pause(LINK_RETRY_MS if missing else self._ping_ms)

    async def _open_link(self, node_id: int) -> None:
        try:
            with suppress(MansioError):  # it is tried again
                await self._links.open(node_id, timeout_ms=LINK_TIMEOUT_MS)
        finally:
            self._opening.discard(node_id)

    async def _ping(self, node_id: int) -> None:
        """Send a request; if there is no response, its connection closes."""
        request = messages.encode_request(ApiKey.API_VERSIONS, 0, 0, CLIENT_ID, {})
        with suppress(MansioError):
            await self._peers.send(node_id, request, timeout_ms=LINK_TIMEOUT_MS)

    async def _pause(self, wait_ms: float) -> None:
        """Wait until a broker or a connection changes, at most `wait_ms`."""
        self._waiting = self._scheduler.promise()
        timer = self._scheduler.call_later(wait_ms, self._wake)
        try:
            await self._waiting
        finally:
            self._waiting = None
            timer.cancel()

    def _wake(self) -> None:
        if self._waiting is not None:
            complete(self._waiting, None)

    def _handle_link_change(self, node_id: int, change: LinkChange) -> None:
        suspicion = self._suspicions.record_link(node_id, change, self._clock.monotonic())
        self._wake()
        if suspicion is not None:
            self._begin_examination(suspicion)

    def _begin_examination(self, suspicion: Suspicion) -> None:
        if suspicion not in self._examined and self._has_session():
            self._examined.add(suspicion)
            self._scheduler.spawn(self._examine(suspicion), name="examine a broker")

    # ------------------------------------------------------------------ accuser

    async def _examine(self, suspicion: Suspicion) -> None:
        try:
            while self._suspicions.wants_connect(suspicion):
                await self._scheduler.sleep(CONNECT_INTERVAL_MS)
                self._suspicions.record_connect(suspicion, await self._try_connect(suspicion))
            confirmers = self._suspicions.confirmers(suspicion, self._clock.monotonic())[:CONFIRMERS_MAX]
            for confirmer in confirmers:
                if await self._is_confirmed(suspicion, confirmer):
                    await self._end_session(suspicion, confirmer)
                    break
            else:
                if self._suspicions.stands(suspicion):
                    self._report(NOT_CONFIRMED, suspicion, asked=",".join(map(str, confirmers)))
        except MansioError as error:
            self._report(NOT_ENDED, suspicion, reason=error.message)
        finally:
            self._examined.discard(suspicion)
            if self._suspicions.wants_connect(suspicion):  # the connections were lost again meanwhile
                self._begin_examination(suspicion)

    async def _try_connect(self, suspicion: Suspicion) -> ConnectOutcome:
        if not self._has_session():
            return ConnectOutcome.UNKNOWN
        return await self._links.try_connect(suspicion.node_id, timeout_ms=CONNECT_TIMEOUT_MS)

    async def _is_confirmed(self, suspicion: Suspicion, confirmer: int) -> bool:
        session = self._session()
        if session is None or not self._has_session():
            return False
        asked = {
            "node_id": self._node_id,
            "broker_epoch": session.epoch,
            "suspect_id": suspicion.node_id,
            "suspect_epoch": suspicion.epoch,
        }
        request = messages.encode_request(ApiKey.CONFIRM_HAND_OVER, 0, 0, CLIENT_ID, asked)
        try:
            frame = await self._peers.send(confirmer, request, timeout_ms=CONFIRMATION_TIMEOUT_MS)
            _, response = messages.decode_response_frame(ApiKey.CONFIRM_HAND_OVER, 0, frame)
            if response.error_code:
                raise error_for_code(response.error_code, response.error_message or "")
        except MansioError as error:
            known = fields(broker=suspicion.node_id, asked=confirmer, reason=error.message)
            logger.info("hand_over_not_answered", extra=known)
            return False
        return bool(response.confirmed)

    async def _end_session(self, suspicion: Suspicion, confirmer: int) -> None:
        if (
            self._state.feature_level < CURRENT_LEVEL
        ):  # leaders of older versions would not wait for the lease
            self._report(NOT_ENDED, suspicion, reason="the upgrade of the cluster is not finalized")
            return
        entry = await self._store.get(self._state.keys.session(suspicion.node_id))
        lease = None if entry is None else decode(entry.key, entry.value).get("lease")
        for _ in range(ATTEMPTS_MAX):
            accusation = self._suspicions.accusation(suspicion, confirmer, self._clock.monotonic())
            if accusation is None or lease is None or not self._has_session():
                break
            compares, operations = self._transaction(accusation, lease)
            if len(compares) > self._store.operations_max:
                break
            try:
                done = await self._store.transact(compares, operations)
            except AmbiguousOutcome:  # what was seen of the broker is looked at again
                continue
            if done.succeeded:
                self._report(HANDED_OVER, suspicion, confirmed_by=confirmer, controller=len(operations) > 2)
                return
            await self._state.wait_for_revision(done.revision, self._scheduler)
        self._report(NOT_ENDED, suspicion, reason="the metadata have changed")

    def _transaction(self, accusation: Accusation, lease: int) -> tuple[list[Compare], list[Put | Delete]]:
        keys, controller, suspicion = self._state.keys, self._state.controller, accusation.suspicion
        node_id = suspicion.node_id
        registration = self._state.registrations.get(node_id)
        compares = [
            Compare(keys.session(node_id), create_revision=suspicion.epoch),
            Compare(
                keys.registration(node_id),
                mod_revision=0 if registration is None else registration.mod_revision,
            ),
            Compare(keys.controller, create_revision=0 if controller is None else controller.epoch),
        ]
        compares += [
            Compare(keys.session(witness), create_revision=epoch) for witness, epoch in accusation.witnesses
        ]
        ended = encode({"epoch": suspicion.epoch}, new_writer_id(self._random))
        operations: list[Put | Delete] = [
            Delete(keys.session(node_id)),
            Put(keys.ended_session(node_id), ended, lease),
        ]
        if controller is not None and controller.node_id == node_id:
            operations.append(Delete(keys.controller))
        return compares, operations

    def _report(self, outcome: str, suspicion: Suspicion, **known: object) -> None:
        self.counts[outcome] += 1
        level = logging.WARNING if outcome == HANDED_OVER else logging.INFO
        extra = fields(broker=suspicion.node_id, epoch=suspicion.epoch, **known)
        logger.log(level, EVENTS[outcome], extra=extra)

    # ------------------------------------------------------------------ confirmer

    async def confirm(self, node_id: int, epoch: int) -> bool:
        """Whether this broker, too, has no connection to another one with this epoch, and its connects are refused."""
        suspicion = Suspicion(node_id, epoch)
        if self._confirmations >= CONFIRMATIONS_MAX:
            return False
        self._confirmations += 1
        try:
            for _ in range(REFUSED_CONNECTS):
                await self._scheduler.sleep(CONFIRMATION_INTERVAL_MS)
                if not self._suspicions.may_confirm(suspicion):
                    return False
                if await self._try_connect(suspicion) is not ConnectOutcome.REFUSED:
                    return False
            return self._has_session() and self._suspicions.may_confirm(suspicion)
        finally:
            self._confirmations -= 1
