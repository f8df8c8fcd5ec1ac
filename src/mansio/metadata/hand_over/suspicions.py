"""Suspicions: which brokers were killed, judged by the connections to them. Pure; times are monotonic seconds.

A broker process that is killed ends all of its connections at once, and from then on its host refuses connects to its
port. A broker that is paused, slow or cut off does neither: a suspicion needs both.

    all connections lost within 200 ms -> suspected -> three connects refused -> another broker confirms -> accused

A suspicion is dropped when a connect has another outcome, when a connection is opened, and when the session ends or its
broker is draining.

Something between brokers may refuse connects although the broker behind it is running. Then a session ends that should
not; its broker registers again. Three rules bound this:

* Another broker confirms: it has no connection to the suspect either, and its connects are refused, too.
* More than half of the registered active brokers are witnesses: the accuser and brokers to which it has a connection.
  A broker that is not active any more is counted for the time of a lease.
* A session is accused, and its broker is a witness, only from the time of a lease after the session was first seen.

The transaction that ends the session requires the sessions of the witnesses. So of any sessions that end early within
the time of a lease, the last one had more than half of the brokers as witnesses, and none of these had lost its session
in that time: fewer than half of the brokers lose their sessions, whatever they accuse each other of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.ports import ConnectOutcome, LinkChange

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

ENDING_S_MAX: Final = 0.2
"""Time within which all connections to a killed broker end."""

ENDINGS_APART_S: Final = 1.0
"""A connection that was lost longer ago than this ended for another reason than those that are lost now."""

REFUSED_CONNECTS: Final = 3
"""Number of connects in a row that have to be refused."""


class Suspicion(NamedTuple):
    """A session of another broker that may have been killed. `epoch` is the broker epoch."""

    node_id: int
    epoch: int


class Accusation(NamedTuple):
    """What ends a session early: the session, and the witnesses (node id, broker epoch), whose sessions must exist."""

    suspicion: Suspicion
    witnesses: tuple[tuple[int, int], ...]


class _Links:
    """Connections to one broker. `ending_since`: when the first of those was lost that were lost one soon after the
    other; None if none was lost since the last one was opened."""

    __slots__ = ("ending_since", "lost_at", "open_count")

    def __init__(self) -> None:
        self.open_count = 0
        self.ending_since: float | None = None
        self.lost_at = 0.0

    def lose(self, now: float) -> bool:
        """Record a lost connection; return whether all connections have now ended at once."""
        if self.ending_since is None or now - self.lost_at > ENDINGS_APART_S:
            self.ending_since = now
        self.lost_at = now
        return self.open_count == 0 and now - self.ending_since <= ENDING_S_MAX


class Suspicions:
    """Suspicions of one broker."""

    __slots__ = ("_active", "_left", "_links", "_node_id", "_refused", "_sessions", "_ttl_s")

    def __init__(self, node_id: int, ttl_s: float) -> None:
        """`node_id`: that of this broker. `ttl_s`: duration of a lease in seconds."""
        self._node_id = node_id
        self._ttl_s = ttl_s
        self._sessions: dict[int, tuple[int, float]] = {}
        """Node id -> epoch of its session, and when the session was first seen."""
        self._active: frozenset[int] = frozenset()
        self._left: dict[int, float] = {}
        """Node id of each broker that is not active any more -> since when."""
        self._links: dict[int, _Links] = {}
        self._refused: dict[Suspicion, int] = {}
        """Refused connects of each suspicion."""

    def update(self, epochs: Mapping[int, int], active: Collection[int], now: float) -> None:
        """Update with the metadata: the epochs of all sessions by node id, and the registered active brokers, with a
        session or without."""
        seen = self._sessions
        self._sessions = {
            node_id: seen[node_id] if seen.get(node_id, (0, 0))[0] == epoch else (epoch, now)
            for node_id, epoch in epochs.items()
        }
        left, self._active = self._active.difference(active), frozenset(active)
        self._left = {
            node_id: at
            for node_id, at in {**self._left, **dict.fromkeys(left, now)}.items()
            if node_id not in self._active and now - at < self._ttl_s
        }
        self._refused = {one: count for one, count in self._refused.items() if self._is_current(one)}

    def record_link(self, node_id: int, change: LinkChange, now: float) -> Suspicion | None:
        """Record what happened to a connection; return the suspicion that begins with it."""
        links = self._links.setdefault(node_id, _Links())
        if change is LinkChange.OPENED:
            links.open_count += 1
            links.ending_since = None
            self._refused = {one: count for one, count in self._refused.items() if one.node_id != node_id}
            return None
        links.open_count = max(0, links.open_count - 1)
        if change is LinkChange.CLOSED or not links.lose(now):
            return None
        suspicion = Suspicion(node_id, self._sessions.get(node_id, (0, 0))[0])
        if not self._is_steady(node_id, now) or not self._is_current(suspicion):
            return None
        self._refused[suspicion] = 0
        return suspicion

    def wants_connect(self, suspicion: Suspicion) -> bool:
        """Whether a suspicion stands and needs another refused connect."""
        return self._refused.get(suspicion, REFUSED_CONNECTS) < REFUSED_CONNECTS

    def record_connect(self, suspicion: Suspicion, outcome: ConnectOutcome) -> None:
        """Record the outcome of a connect to the suspect."""
        if suspicion not in self._refused:
            return
        if outcome is ConnectOutcome.REFUSED:
            self._refused[suspicion] += 1
        else:
            del self._refused[suspicion]

    def stands(self, suspicion: Suspicion) -> bool:
        """Whether a suspicion has as many refused connects as it needs."""
        return self._refused.get(suspicion, 0) >= REFUSED_CONNECTS

    def confirmers(self, suspicion: Suspicion, now: float) -> list[int]:
        """Return the brokers that may confirm a suspicion, in the order in which they are asked; empty if it does not
        stand, or could not end the session."""
        others = self._witnesses(suspicion, now)
        if not self._is_majority(1 + len(others), now) or not self._is_steady(self._node_id, now):
            return []
        return sorted(
            others, key=lambda node_id: (node_id < self._node_id, node_id)
        )  # accusers ask different ones

    def accusation(self, suspicion: Suspicion, confirmer: int, now: float) -> Accusation | None:
        """Return how the session of a suspect is ended that `confirmer` has confirmed; None if it is not to be."""
        others = self.confirmers(suspicion, now)
        if confirmer not in others:
            return None
        others.remove(confirmer)
        witnesses = [self._node_id, confirmer]
        while not self._is_majority(len(witnesses), now):
            witnesses.append(others.pop(0))
        return Accusation(suspicion, tuple((node_id, self._sessions[node_id][0]) for node_id in witnesses))

    def may_confirm(self, suspicion: Suspicion) -> bool:
        """Whether this broker may confirm the suspicion of another one, if its own connects are refused."""
        links = self._links.get(suspicion.node_id)
        return self._is_current(suspicion) and (links is None or links.open_count == 0)

    def _witnesses(self, suspicion: Suspicion, now: float) -> list[int]:
        if not self.stands(suspicion):
            return []
        return [
            node_id
            for node_id, links in self._links.items()
            if links.open_count and node_id != suspicion.node_id and self._is_steady(node_id, now)
        ]

    def _is_majority(self, count: int, now: float) -> bool:
        lately = sum(now - at < self._ttl_s for at in self._left.values())
        return 2 * count > len(self._active) + lately

    def _is_steady(self, node_id: int, now: float) -> bool:
        """Whether a broker is active and has had its session for the time of a lease, as far as this broker knows."""
        epoch, since = self._sessions.get(node_id, (0, now))
        return epoch != 0 and node_id in self._active and now - since >= self._ttl_s

    def _is_current(self, suspicion: Suspicion) -> bool:
        """Whether the session of another broker exists, and the broker is neither draining nor fenced."""
        epoch, _ = self._sessions.get(suspicion.node_id, (0, 0))
        return (
            suspicion.node_id != self._node_id
            and suspicion.node_id in self._active
            and 0 < epoch == suspicion.epoch
        )
