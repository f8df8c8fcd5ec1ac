"""Quota service: rate quotas of clients, stored in the metadata store and enforced by throttling (KIP-13), and rates at
which addresses may create connections (KIP-612).

Each broker of a cluster enforces a quota for itself, as in Kafka: a client may use the whole rate on every broker. A
request that exceeds the quota is answered at once with the time for which its client must pause (`throttle_time_ms`),
and its connection is not read for that time (KIP-219). Changes of topics that exceed the quota are refused where the
client knows the error (KIP-599).

Owns the effective rates (`QuotaService.active`, `QuotaService.connection_rates`) and the throttle counters. The quotas
are keys of the metadata store and are read through `MetadataImage`.

Invariants:
* `active` is None while there is no quota of bytes, so that produce and fetch need only one comparison.
* A change is durable before the request is answered. A stored quota whose name this version does not know is described,
  and has no effect.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from mansio.broker.topics.mutation_quota import MutationQuota
from mansio.config.item_limit import too_many_items
from mansio.errors import (
    AuthorizationFailed,
    ConcurrentChange,
    InvalidRequest,
    MansioError,
    PolicyViolation,
    UnsupportedVersion,
)
from mansio.logs import fields
from mansio.metadata import metadata_store
from mansio.metadata.metadata_store import CONFLICT_ATTEMPTS_MAX, Compare, Delete, Put, new_writer_id
from mansio.state.authorization.acls import Operation
from mansio.state.connection_rates import ConnectionRates
from mansio.state.quota import (
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    PRODUCER_BYTE_RATE,
    EntityName,
    NonLiteralName,
    QuotaEntity,
    QuotaScope,
    RateLimiter,
)
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.ports import Clock, Random, Scheduler

logger = logging.getLogger(__name__)

USER: Final = "user"
CLIENT_ID: Final = "client-id"
IP: Final = "ip"
ENTITY_FIELDS: Final = {USER: "user", CLIENT_ID: "client_id", IP: "ip"}
"""Types of entities that can have quotas: Kafka's name, and the field of `QuotaEntity`."""

ENTITIES_MAX: Final = 10_000
"""Maximum number of entities with quotas."""

NAME_CHARACTERS_MAX: Final = 1000
"""Maximum length of a user or client id that has quotas."""

RATE_MAX: Final = float(1 << 62)
"""Maximum rate per second."""

MUTATION_RATE_MIN: Final = 0.001
"""Minimum of `controller_mutation_rate`, in partitions per second."""

BYTE_RATES: Final = (PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE)
QUOTA_NAMES: Final = (*BYTE_RATES, CONTROLLER_MUTATION_RATE)
UNSUPPORTED_QUOTA_REASONS: Final = {
    "request_percentage": "all requests are served by one event loop, so there is no thread time to divide",
}
"""Quotas of Kafka that Mansio does not support, with the reason."""


class QuotaCounters:
    """Numbers of throttled responses, and the sums of their throttle times."""

    __slots__ = (
        "fetch_throttled",
        "fetch_throttled_ms",
        "mutation_throttled",
        "mutation_throttled_ms",
        "produce_throttled",
        "produce_throttled_ms",
    )

    def __init__(self) -> None:
        self.produce_throttled = 0
        self.produce_throttled_ms = 0
        self.fetch_throttled = 0
        self.fetch_throttled_ms = 0
        self.mutation_throttled = 0
        self.mutation_throttled_ms = 0


class Quota(NamedTuple):
    """Stored quotas of one entity. `values`: rates per second by Kafka's name of the quota."""

    entity: QuotaEntity
    values: Mapping[str, float]


class MatchType(IntEnum):
    """How a component of a filter matches an entity, as Kafka numbers it."""

    EXACT = 0
    DEFAULT = 1
    ANY = 2


@dataclass(frozen=True, slots=True)
class QuotaFilter:
    """Component of a filter: matches entities that have a component of type `kind` (`USER`, `CLIENT_ID`, `IP`) and, for
    `MatchType.EXACT`, with this name."""

    kind: str
    match_type: int
    name: str | None = None


@dataclass(frozen=True, slots=True)
class QuotaAlteration:
    """Changes of the quotas of one entity. `entity`: (type, name) pairs, the name None for the default of the type.
    `changes`: (quota, rate per second) pairs, the rate None to remove the quota."""

    entity: Sequence[tuple[str, str | None]]
    changes: Sequence[tuple[str, float | None]]


THROTTLED_MAX: Final = 256
"""Maximum number of clients that are remembered as throttled: the last ones."""


class ThrottledReader(NamedTuple):
    """A client whose reads are throttled: the rest of its pause, and the quota that applies to it."""

    user: str
    client_id: str
    pause_ms: int
    scope: QuotaScope
    rate: float


class ActiveQuotas:
    """Rate limiters of produce and fetch. They exist while any quota of bytes is set."""

    __slots__ = ("_clock", "_counters", "_throttled", "consumers", "producers")

    def __init__(self, clock: Clock, counters: QuotaCounters, burst_ms: int) -> None:
        self._clock = clock
        self._counters = counters
        self.producers = RateLimiter(burst_ms=burst_ms)
        self.consumers = RateLimiter(burst_ms=burst_ms)
        self._throttled: dict[tuple[str, str], None] = {}
        """Users and client ids whose reads were throttled, the last one last."""

    def record_produce(self, user: str, client_id: str | None, size_bytes: int) -> int:
        """Record a produce request of `size_bytes`; return the throttle time in ms, for which the caller must not read
        from the connection."""
        throttle_ms = self.producers.take(user, client_id or "", size_bytes, self._clock.monotonic())
        if throttle_ms:
            self._counters.produce_throttled += 1
            self._counters.produce_throttled_ms += throttle_ms
        return throttle_ms

    def record_fetch(self, user: str, client_id: str | None, size_bytes: int) -> int:
        """Record a fetch response with `size_bytes` of records; return the throttle time in ms, for which the caller
        must not read from the connection."""
        throttle_ms = self.consumers.take(user, client_id or "", size_bytes, self._clock.monotonic())
        if throttle_ms:
            self._counters.fetch_throttled += 1
            self._counters.fetch_throttled_ms += throttle_ms
            key = user, client_id or ""
            self._throttled.pop(key, None)
            self._throttled[key] = None
            if len(self._throttled) > THROTTLED_MAX:
                del self._throttled[next(iter(self._throttled))]
        return throttle_ms

    def throttled_readers(self) -> list[ThrottledReader]:
        """Return the clients whose reads are throttled now, of the last `THROTTLED_MAX` that were."""
        now, found = self._clock.monotonic(), []
        for user, client_id in list(self._throttled):
            pause_ms = self.consumers.take(user, client_id, 0, now)
            quota = self.consumers.quota_of(user, client_id)
            if not pause_ms or quota is None:
                del self._throttled[user, client_id]
            else:
                found.append(ThrottledReader(user, client_id, pause_ms, *quota))
        return found

    def is_throttled(self, user: str, client_id: str | None) -> bool:
        """Return whether a fetch must return no records now, because earlier fetches exceeded the quota."""
        return self.consumers.take(user, client_id or "", 0, self._clock.monotonic()) > 0

    def fetch_max_bytes(self, user: str, client_id: str | None) -> int | None:
        """Return the maximum size of one fetch response, None for no bound. A response of this size does not lead to a
        throttle time longer than the burst time."""
        return self.consumers.burst_bytes(user, client_id or "", self._clock.monotonic())


class QuotaService:
    """Describes, alters and enforces quotas. All methods run on the broker's event loop."""

    __slots__ = (
        "_authorization",
        "_burst_ms",
        "_clock",
        "_mutations",
        "_random",
        "_scheduler",
        "_state",
        "_stopped",
        "_store",
        "active",
        "connection_rates",
        "counters",
    )

    def __init__(
        self,
        *,
        store: MetadataStore,
        state: MetadataImage,
        scheduler: Scheduler,
        random: Random,
        clock: Clock,
        burst_ms: int,
        authorization: Authorization,
    ) -> None:
        self._authorization = authorization
        self._store = store
        self._state = state
        self._scheduler = scheduler
        self._random = random
        self._clock = clock
        self._burst_ms = burst_ms
        self._stopped = False
        self.counters = QuotaCounters()
        self.active: ActiveQuotas | None = None
        self._mutations: RateLimiter | None = (
            None  # apart from `active`: no reason to measure what is produced
        )
        self.connection_rates: ConnectionRates | None = None
        """Rates of new connections by address; None while there is no such quota."""
        state.on_quota_change(self._refresh)
        self._refresh()

    @property
    def bucket_count(self) -> int:
        """Number of token buckets: one for each recently active client and each limited direction, and one for each
        address that has connected recently."""
        active = self.active
        limiters = () if active is None else (active.producers, active.consumers)
        return sum(map(len, (*limiters, *filter(None, (self._mutations, self.connection_rates)))))

    def stop(self) -> None:
        """End all throttling, because the broker is stopping and waiting requests shall be answered soon."""
        self._stopped = True
        self.active = self._mutations = None
        self.connection_rates = None

    def mutation_quota(self, user: str, client_id: str | None, *, is_strict: bool) -> MutationQuota | None:
        """Return the quota of one request that changes topics; None if there is no such quota. Pass it to
        `record_mutations` after the request."""
        if self._mutations is None:
            return None
        return MutationQuota(self._mutations, self._clock, user, client_id or "", is_strict=is_strict)

    def record_mutations(self, quota: MutationQuota | None) -> int:
        """Record that a request with this quota has ended; return the throttle time in ms, for which the caller must
        not read from the connection."""
        throttle_ms = 0 if quota is None else quota.throttle_ms
        if throttle_ms:
            self.counters.mutation_throttled += 1
            self.counters.mutation_throttled_ms += throttle_ms
        return throttle_ms

    def count_mutation(self, caller: Caller) -> None:
        """Count a change of credentials in the quota of a caller (`controller_mutation_rate`), like that of one
        partition. Raises `ThrottlingQuotaExceeded` if the quota is used up."""
        if caller.session.is_broker:
            return
        quota = self.mutation_quota(caller.session.user, caller.client_id, is_strict=True)
        if quota is not None:
            try:
                quota.record(1)
            finally:
                self.record_mutations(quota)

    def list_quotas(self) -> list[Quota]:
        """Return all stored quotas."""
        return [
            Quota(_decode_entity(entry.document["entity"]), entry.document["values"])
            for _, entry in sorted(self._state.quotas.items())
        ]

    def describe(
        self, filters: Sequence[QuotaFilter] = (), *, strict: bool = False, caller: Caller
    ) -> list[Quota]:
        """Return the quotas of the entities that match all filters. With `strict`, entities that have other components
        are left out.

        Raises `ClusterAuthorizationFailed` without DESCRIBE_CONFIGS for the cluster, `InvalidRequest`, and
        `UnsupportedVersion` for an unknown type of entity.
        """
        self._authorization.check_cluster(caller, Operation.DESCRIBE_CONFIGS)
        _check_filters(filters)
        return [quota for quota in self.list_quotas() if _matches(quota.entity, filters, strict=strict)]

    async def alter_each(
        self, alterations: Sequence[QuotaAlteration], *, validate_only: bool = False, caller: Caller
    ) -> list[MansioError | None]:
        """Change the quotas of several entities. Return the error of each entity, or None. Errors:
        `ClusterAuthorizationFailed` without ALTER_CONFIGS for the cluster, those of `alter`,
        `InvalidRequest` for an entity that occurs more than once or cannot have quotas, `PolicyViolation` for too many
        entities."""
        try:
            self._authorization.check_cluster(caller, Operation.ALTER_CONFIGS)
        except AuthorizationFailed as error:
            return [without_traceback(error)] * len(alterations)
        if (refused := too_many_items(len(alterations))) is not None:
            return [refused] * len(alterations)
        count = Counter(_entity_identity(each) for each in alterations)
        errors: list[MansioError | None] = []
        for each in alterations:
            try:
                if count[_entity_identity(each)] > 1:
                    raise InvalidRequest("an entity is in the request more than once")
                changes: dict[str, float | None] = {}
                for name, value in each.changes:
                    if name in changes:
                        raise InvalidRequest(f"{name} is changed twice")
                    changes[name] = value
                await self.alter(_named_entity(each.entity), changes, validate_only=validate_only)
            except MansioError as error:
                errors.append(without_traceback(error))
            else:
                errors.append(None)
        return errors

    async def alter(
        self, entity: QuotaEntity, changes: Mapping[str, float | None], *, validate_only: bool = False
    ) -> None:
        """Set quotas of one entity, in units per second; None removes a quota, even one that could not be set. The
        change is effective on this broker on return.

        Raises `InvalidRequest`, `PolicyViolation` (too many entities), `ConcurrentChange`, `StorageError`.
        """
        if any(value is not None for value in changes.values()):
            check_entity(entity)
        for name, value in changes.items():
            if value is not None:
                _check_kind(entity, name)
                _check_value(name, value)
        key = f"{self._state.keys.quotas}{_key(entity)}"
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            known = self._state.quotas.get(key)
            before = {} if known is None else known.document["values"]
            values = {name: value for name, value in {**before, **changes}.items() if value is not None}
            if known is None and len(self._state.quotas) >= ENTITIES_MAX:
                raise PolicyViolation(f"there are {ENTITIES_MAX} entities with quotas, which is the limit")
            if validate_only or values == before:
                return
            revision = 0 if known is None else known.mod_revision
            if await self._write(key, revision, entity, values):
                logger.info("quota_changed", extra=fields(entity=_key(entity), values=_format_values(values)))
                return
        raise ConcurrentChange("these quotas are being changed concurrently")

    async def _write(self, key: str, revision: int, entity: QuotaEntity, values: Mapping[str, float]) -> bool:
        guard = [Compare(key, mod_revision=revision)]
        if values:
            writer = new_writer_id(self._random)
            document = {"entity": _encode_entity(entity), "values": values}
            put = Put(key, metadata_store.encode(document, writer))
            done = await metadata_store.transact_resolving_ambiguity(self._store, guard, [put], writer)
        else:
            done = await self._store.transact(guard, [Delete(key)])
        await self._state.wait_for_revision(done.revision, self._scheduler)
        return done.succeeded

    def _refresh_connection_rates(self) -> None:
        rates: dict[EntityName, float] = {
            entity.ip: values[CONNECTION_CREATION_RATE]
            for entity, values in self.list_quotas()
            if entity.ip is not NonLiteralName.ABSENT and CONNECTION_CREATION_RATE in values
        }
        if self._stopped or not rates:
            self.connection_rates = None
            return
        if self.connection_rates is None:
            self.connection_rates = ConnectionRates(burst_ms=self._burst_ms)
        self.connection_rates.set_rates(rates)

    def _refresh(self) -> None:
        self._refresh_connection_rates()
        rates: dict[str, dict[QuotaEntity, float]] = {name: {} for name in QUOTA_NAMES}
        for entity, values in self.list_quotas():
            for name in QUOTA_NAMES:
                if name in values:
                    rates[name][entity] = values[name]
        mutation_rates = rates.pop(CONTROLLER_MUTATION_RATE)
        if self._stopped or not mutation_rates:
            self._mutations = None
        else:
            if self._mutations is None:
                self._mutations = RateLimiter(burst_ms=self._burst_ms)
            self._mutations.set_rates(mutation_rates)
        if self._stopped or not any(rates.values()):
            self.active = None
            return
        if self.active is None:
            self.active = ActiveQuotas(self._clock, self.counters, self._burst_ms)
        self.active.producers.set_rates(rates[PRODUCER_BYTE_RATE])
        self.active.consumers.set_rates(rates[CONSUMER_BYTE_RATE])


def _check_filters(filters: Sequence[QuotaFilter]) -> None:
    kinds = [each.kind for each in filters]
    for kind in kinds:
        if kind == "":
            raise InvalidRequest("a filter names no type of entity")
        if kind not in ENTITY_FIELDS:
            raise UnsupportedVersion(f"{kind!r}: quotas are for user and client-id, or ip")
    if len(set(kinds)) != len(kinds):
        raise InvalidRequest("a filter names a type of entity more than once")
    if IP in kinds and len(kinds) > 1:
        raise InvalidRequest("ip cannot be combined with other types of entities")
    for each in filters:
        if each.match_type not in tuple(MatchType):
            raise InvalidRequest(f"unknown match type {each.match_type}")
        if each.match_type == MatchType.EXACT and each.name is None:
            raise InvalidRequest("an exact match needs a name")


def _matches(entity: QuotaEntity, filters: Sequence[QuotaFilter], *, strict: bool) -> bool:
    for each in filters:
        name: EntityName = getattr(entity, ENTITY_FIELDS[each.kind])
        if name is NonLiteralName.ABSENT:
            return False
        if each.match_type == MatchType.EXACT and name != each.name:
            return False
        if each.match_type == MatchType.DEFAULT and name is not NonLiteralName.DEFAULT:
            return False
    components = sum(name is not NonLiteralName.ABSENT for name in entity)
    return not (strict and filters) or components == len(filters)


def _entity_identity(alteration: QuotaAlteration) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((kind, name or "") for kind, name in alteration.entity))


def _named_entity(components: Sequence[tuple[str, str | None]]) -> QuotaEntity:
    names: dict[str, EntityName] = {}
    for kind, name in components:
        if kind not in ENTITY_FIELDS:
            raise InvalidRequest(f"{kind!r}: quotas are for user and client-id, or ip")
        if ENTITY_FIELDS[kind] in names:
            raise InvalidRequest(f"{kind} is named twice in one entity")
        names[ENTITY_FIELDS[kind]] = NonLiteralName.DEFAULT if name is None else name
    if not names:
        raise InvalidRequest("an entity needs a user, a client-id, or both; or an ip")
    return QuotaEntity(**names)


def check_entity(entity: QuotaEntity) -> None:
    """Raise `InvalidRequest` if an entity cannot have quotas."""
    for name in entity:
        if name == "" or (isinstance(name, str) and len(name) > NAME_CHARACTERS_MAX):
            raise InvalidRequest(f"a name of a quota has 1 to {NAME_CHARACTERS_MAX} characters")
    if entity.ip is NonLiteralName.ABSENT:
        return
    if entity != QuotaEntity(ip=entity.ip):
        raise InvalidRequest("ip cannot be combined with other types of entities")
    if isinstance(entity.ip, str):
        try:
            ip_address(entity.ip)
        except ValueError:
            raise InvalidRequest(f"ip: {entity.ip!r} is not an IPv4 or IPv6 address") from None


def _check_kind(entity: QuotaEntity, name: str) -> None:
    """Raise `InvalidRequest` if a quota is not one of this type of entity."""
    is_of_address = entity.ip is not NonLiteralName.ABSENT
    if is_of_address and name != CONNECTION_CREATION_RATE:
        raise InvalidRequest(f"{name}: the only quota of an ip is {CONNECTION_CREATION_RATE}")
    if name == CONNECTION_CREATION_RATE and not is_of_address:
        raise InvalidRequest(f"{name} is a quota of an ip")


def _check_value(name: str, value: float) -> None:
    if name not in QUOTA_NAMES and name != CONNECTION_CREATION_RATE:
        why = UNSUPPORTED_QUOTA_REASONS.get(name)
        raise InvalidRequest(f"{name} is not offered: {why}" if why else f"{name}: no such quota")
    if name == CONTROLLER_MUTATION_RATE:
        if not MUTATION_RATE_MIN <= value <= RATE_MAX:  # not for NaN, either
            raise InvalidRequest(
                f"{name}: {value} is not a number of partitions per second, {MUTATION_RATE_MIN} or more"
            )
    elif not (math.isfinite(value) and 1 <= value <= RATE_MAX and value == int(value)):
        unit = "connections" if name == CONNECTION_CREATION_RATE else "bytes"
        raise InvalidRequest(f"{name}: {value} is not a whole number of {unit} per second, 1 or more")


def _format_values(values: Mapping[str, float]) -> str:
    return ",".join(f"{name}={rate:.15g}" for name, rate in sorted(values.items())) or "none"


def _key(entity: QuotaEntity) -> str:
    parts = []
    for kind, name in entity._asdict().items():
        if name is not NonLiteralName.ABSENT:
            parts.append(kind if name is NonLiteralName.DEFAULT else f"{kind}={quote(name, safe='')}")
    return ",".join(parts)


def _encode_entity(entity: QuotaEntity) -> dict[str, str | None]:
    """Return the stored form of an entity; a null name stands for the default of its type."""
    return {
        kind: None if name is NonLiteralName.DEFAULT else name
        for kind, name in entity._asdict().items()
        if name is not NonLiteralName.ABSENT
    }


def _decode_entity(document: Mapping[str, Any]) -> QuotaEntity:
    def name(kind: str) -> EntityName:
        if kind not in document:
            return NonLiteralName.ABSENT
        return NonLiteralName.DEFAULT if document[kind] is None else str(document[kind])

    return QuotaEntity(name("user"), name("client_id"), name("ip"))
