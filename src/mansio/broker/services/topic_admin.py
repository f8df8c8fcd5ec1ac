"""Topic administration: finds, creates, deletes and extends topics for a caller.

`TopicService` executes the changes. This service asks the authorizer before, and counts created and deleted partitions
against the quota of the caller (`controller_mutation_rate`, KIP-599).

Invariants:
* A result is returned for each item of a request, in their order; an error of one item does not affect the others.
* An item that is named twice in a request is rejected in both positions and not executed, as in Kafka.
* A request for more than `ITEMS_MAX` changes is refused before the first.
* What a caller learns of a topic that it may not DESCRIBE does not depend on whether the topic exists, unless the
  caller knows its id, as in Kafka.

Models: ControllerApis and KafkaApis of Kafka.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from mansio.config.item_limit import too_many_items
from mansio.errors import InvalidRequest, MansioError
from mansio.host.item_turns import ItemTurns
from mansio.state.authorization.acls import CLUSTER_NAME, Operation, ResourceType
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
    from uuid import UUID

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.services.quotas import QuotaService
    from mansio.broker.topics.mutation_quota import MutationQuota
    from mansio.broker.topics.topics import TopicService
    from mansio.config.config_entries import ConfigEntry
    from mansio.metadata.model import Topic
    from mansio.metadata.topic_plan import NewTopic
    from mansio.ports import Scheduler

R = TypeVar("R")


class TopicReference(NamedTuple):
    """A topic by its name, or by its id."""

    name: str | None
    topic_id: UUID | None = None


class MissingTopic(NamedTuple):
    """A topic that was not found, by the name or the id with which it was asked for, and the
    reason."""

    wanted: TopicReference
    error: MansioError


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    """A topic that was created or planned. `configs`: its settings, None if the caller may not DESCRIBE_CONFIGS it."""

    topic: Topic
    configs: Sequence[ConfigEntry] | None


class DeletedTopic(NamedTuple):
    """Outcome of the deletion of one topic, for which `error` is None if it succeeded. `name` and `topic_id`: as far as
    the caller may know them."""

    name: str | None
    topic_id: UUID | None
    error: MansioError | None = None


class TopicGrowth(NamedTuple):
    """A topic and the number of partitions that it shall have. `assignments`: see `TopicService.add_partitions`."""

    name: str
    partitions: int
    assignments: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class Mutations(Generic[R]):
    """Results of the items of one request. `throttle_ms`: time for which the client must pause, because it exceeds its
    quota of created and deleted partitions."""

    results: Sequence[R]
    throttle_ms: int = 0


class TopicAdminService:
    """Finds and changes topics for callers. All methods run on the broker's event loop.

    `is_strict` of a method: changes beyond the quota of the caller are refused (`ThrottlingQuotaExceeded`). Otherwise
    they are executed, because the caller does not know the error.
    """

    __slots__ = ("_authorization", "_quotas", "_report_creation", "_scheduler", "_topics")

    def __init__(
        self,
        topics: TopicService,
        *,
        quotas: QuotaService,
        scheduler: Scheduler,
        authorization: Authorization,
        report_creation: Callable[[Caller, str], object] = lambda _caller, _name: None,
    ) -> None:
        """`report_creation` is called for each topic that is created automatically."""
        self._topics = topics
        self._quotas = quotas
        self._scheduler = scheduler
        self._authorization = authorization
        self._report_creation = report_creation

    # Find

    def authorized_operations(self, name: str, *, caller: Caller) -> int:
        """Return the set of operations that the caller may do on a topic (KIP-430)."""
        return self._authorization.authorized_operations(caller, ResourceType.TOPIC, name)

    def authorized_operations_each(self, names: Iterable[str], *, caller: Caller) -> Iterator[int]:
        """Like `authorized_operations`, for each of `names`; see `Authorization.authorized_operations_each`."""
        return self._authorization.authorized_operations_each(caller, ResourceType.TOPIC, names)

    async def list_topics(self, *, caller: Caller) -> list[Topic]:
        """Return all topics that the caller may DESCRIBE."""
        topics = self._topics.state.topics
        if not self._authorization.is_enforced_for(caller):
            return list(topics.values())
        found = await self._describable(list(topics), ItemTurns(self._scheduler), caller)
        return [topic for name in found if (topic := topics.get(name)) is not None]

    async def _describable(self, names: Sequence[str], turns: ItemTurns, caller: Caller) -> list[str]:
        return await self._authorization.allowed_names_in_turns(
            caller, Operation.DESCRIBE, ResourceType.TOPIC, names, turns
        )

    async def find_each(
        self, wanted: Collection[TopicReference], *, may_create: bool, caller: Caller
    ) -> Mutations[Topic | MissingTopic]:
        """Return each topic, which needs DESCRIBE. With `may_create`, a topic that is named and does not
        exist is created if the broker creates topics automatically; that needs CREATE, for the cluster or the topic.

        Errors: `TopicAuthorizationFailed`, `UnknownTopicId`, `InvalidRequest`, and those of
        `TopicService.find_or_auto_create`.
        """
        quota = self._quota(caller, is_strict=False) if may_create else None
        turns, allowed = ItemTurns(self._scheduler), None
        if self._authorization.is_enforced_for(caller):
            allowed = frozenset(await self._describable(self._names(wanted), turns, caller))
        known = self._topics.state.topics
        results: list[Topic | MissingTopic] = []
        for each in wanted:
            await turns.next()
            name = each.name
            if name in known and (allowed is None or name in allowed):
                results.append(known[name])
                continue
            try:
                results.append(
                    await self._find(each, allowed, may_create=may_create, quota=quota, caller=caller)
                )
            except MansioError as error:
                results.append(MissingTopic(each, without_traceback(error)))
        return Mutations(results, self._quotas.record_mutations(quota))

    def _names(self, wanted: Iterable[TopicReference]) -> list[str]:
        """Return the names of topics, as far as they have one."""
        by_id = self._topics.state.topics_by_id
        names = []
        for name, topic_id in wanted:
            if topic_id is None:
                names.append(name or "")
            elif (topic := by_id.get(topic_id)) is not None:
                names.append(topic.name)
        return names

    async def _find(
        self,
        wanted: TopicReference,
        allowed: Collection[str] | None,
        *,
        may_create: bool,
        quota: MutationQuota | None,
        caller: Caller,
    ) -> Topic:
        name, topic_id = wanted
        if topic_id is not None:
            topic = self._topics.find_by_id(topic_id)
            if allowed is not None and topic.name not in allowed:
                raise self._refusal(caller, Operation.DESCRIBE, str(topic_id))
            return topic
        if name is None:
            raise InvalidRequest("a topic must be named, or given by its id from version 12 on (KIP-516)")
        if allowed is not None and name not in allowed:
            raise self._refusal(caller, Operation.DESCRIBE, name)
        return await self._topics.find_or_auto_create(
            name,
            is_allowed_by_client=may_create,
            check_creation=lambda new: self._check_create(new, caller),
            on_created=lambda new: self._report_creation(caller, new),
            quota=quota,
        )

    # Change

    async def create_each(
        self,
        items: Sequence[tuple[str, NewTopic | MansioError]],
        *,
        validate_only: bool = False,
        is_strict: bool = True,
        caller: Caller,
    ) -> Mutations[CreatedTopic | MansioError]:
        """Create topics, which needs CREATE for the cluster or the topic. Each item is a name with the topic, or with
        the error for which it is none; a caller without the right does not learn it.

        Errors: `TopicAuthorizationFailed`, `InvalidRequest` for a name that occurs more than once, `PolicyViolation`
        for too many topics, and those of `TopicService.create`.
        """
        if (refused := too_many_items(len(items))) is not None:
            return Mutations([refused] * len(items))
        repeated = _repeated(name for name, _ in items)
        quota = self._quota(caller, is_strict=is_strict)
        results: list[CreatedTopic | MansioError] = []
        for name, new in items:
            try:
                _check_named_once(name, repeated)
                self._check_create(name, caller)
                if isinstance(new, MansioError):
                    raise copied(new)
                topic = await self._topics.create(new, validate_only=validate_only, quota=quota)
                results.append(CreatedTopic(topic, self._visible_configs(topic, caller)))
            except MansioError as error:
                results.append(without_traceback(error))
        return Mutations(results, self._quotas.record_mutations(quota))

    def _check_create(self, name: str, caller: Caller) -> None:
        """Raise `TopicAuthorizationFailed` unless the caller may CREATE topics, or this one."""
        authorization = self._authorization
        if not authorization.allows(caller, Operation.CREATE, ResourceType.CLUSTER, CLUSTER_NAME):
            authorization.check(caller, Operation.CREATE, ResourceType.TOPIC, name)

    def _visible_configs(self, topic: Topic, caller: Caller) -> list[ConfigEntry] | None:
        may_describe = self._authorization.allows(
            caller, Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, topic.name
        )
        return self._topics.describe(topic) if may_describe else None

    async def delete_each(
        self, items: Sequence[TopicReference], *, is_strict: bool = True, caller: Caller
    ) -> Mutations[DeletedTopic]:
        """Delete topics with their records, which needs DELETE for the cluster or the topic; of a topic that is named,
        DESCRIBE too, and otherwise the result has the name of the topic only with DESCRIBE.

        Errors: `TopicAuthorizationFailed`, `InvalidRequest` for a topic that occurs more than once, `PolicyViolation`
        for too many topics, `UnknownTopicId`, and those of `TopicService.delete`.
        """
        if (refused := too_many_items(len(items))) is not None:
            return Mutations([DeletedTopic(*each, refused) for each in items])
        repeated = _repeated(items)
        has_cluster = self._authorization.allows(caller, Operation.DELETE, ResourceType.CLUSTER, CLUSTER_NAME)
        found: list[Topic | DeletedTopic] = []
        for each in items:
            try:
                _check_named_once(each, repeated)
                found.append(self._find_deletable(each, has_cluster=has_cluster, caller=caller))
            except MansioError as error:
                found.append(DeletedTopic(*each, without_traceback(error)))
        repeated_topics = _repeated(each.topic_id for each in found if not isinstance(each, DeletedTopic))
        quota = self._quota(caller, is_strict=is_strict)
        results = []
        for one in found:
            if isinstance(one, DeletedTopic):
                results.append(one)
                continue
            failure = None
            try:
                if one.topic_id in repeated_topics:  # by its name and by its id
                    raise InvalidRequest(f"topic {one.name!r} is in the request more than once")
                await self._topics.delete(one, quota=quota)
            except MansioError as error:
                failure = without_traceback(error)
            results.append(DeletedTopic(one.name, one.topic_id, failure))
        return Mutations(results, self._quotas.record_mutations(quota))

    def _find_deletable(
        self, wanted: TopicReference, *, has_cluster: bool, caller: Caller
    ) -> Topic | DeletedTopic:
        """Return a topic that the caller may DELETE, or the result with which that is refused. Raises the errors of a
        topic about which the result says nothing."""
        name, topic_id = wanted
        if (name is None) == (topic_id is None):
            raise InvalidRequest("a topic is either named or given by its id")
        if name is not None:
            if not has_cluster:
                self._check_topic(caller, Operation.DESCRIBE, name)
                if name in self._topics.state.topics:
                    self._check_topic(caller, Operation.DELETE, name)
            return self._topics.find(name)
        assert topic_id is not None
        topic = self._topics.find_by_id(topic_id)
        if has_cluster or self._allows(caller, Operation.DELETE, topic.name):
            return topic
        shown = topic.name if self._allows(caller, Operation.DESCRIBE, topic.name) else None
        refusal = self._refusal(caller, Operation.DELETE, shown or str(topic_id))
        return DeletedTopic(shown, topic_id, refusal)

    def _refusal(self, caller: Caller, operation: Operation, name: str) -> MansioError:
        return self._authorization.refusal(caller, operation, ResourceType.TOPIC, name)

    def _allows(self, caller: Caller, operation: Operation, name: str) -> bool:
        return self._authorization.allows(caller, operation, ResourceType.TOPIC, name)

    def _check_topic(self, caller: Caller, operation: Operation, name: str) -> None:
        self._authorization.check(caller, operation, ResourceType.TOPIC, name)

    async def add_partitions_each(
        self,
        items: Sequence[TopicGrowth],
        *,
        validate_only: bool = False,
        is_strict: bool = True,
        caller: Caller,
    ) -> Mutations[MansioError | None]:
        """Add partitions to topics, which needs ALTER. Returns the error of each topic, or None.

        Errors: `TopicAuthorizationFailed`, `InvalidRequest` for a topic that occurs more than once, `PolicyViolation`
        for too many topics, and those of `TopicService.add_partitions`.
        """
        if (refused := too_many_items(len(items))) is not None:
            return Mutations([refused] * len(items))
        repeated = _repeated(each.name for each in items)
        quota = self._quota(caller, is_strict=is_strict)
        errors: list[MansioError | None] = []
        for name, partitions, assignments in items:
            try:
                _check_named_once(name, repeated)
                self._check_topic(caller, Operation.ALTER, name)
                await self._topics.add_partitions(
                    name, partitions, assignments, validate_only=validate_only, quota=quota
                )
            except MansioError as error:
                errors.append(without_traceback(error))
            else:
                errors.append(None)
        return Mutations(errors, self._quotas.record_mutations(quota))

    def _quota(self, caller: Caller, *, is_strict: bool) -> MutationQuota | None:
        """Return the quota of a request, None if there is none: of a client without quota, or of a broker."""
        if caller.session.is_broker:
            return None
        return self._quotas.mutation_quota(caller.session.user, caller.client_id, is_strict=is_strict)


H = TypeVar("H", bound="Hashable")


def _repeated(items: Iterable[H]) -> frozenset[H]:
    return frozenset(item for item, count in Counter(items).items() if count > 1)


def _check_named_once(item: H, repeated: Collection[H]) -> None:
    if item in repeated:
        raise InvalidRequest("a topic is in the request more than once")
