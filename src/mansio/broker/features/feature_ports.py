"""What the features of a broker's partitions use of the outside world (`FeaturePorts`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from mansio.broker.log_view.replay import ViewReplay
from mansio.broker.log_view.view import LogView
from mansio.errors import LeaderNotAvailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from uuid import UUID

    from mansio.broker.partition.partition import Partition
    from mansio.broker.routing.caller import Caller
    from mansio.ports import Background, Clock, Disk, Scheduler
    from mansio.state.authorization.acls import Operation

V = TypeVar("V", bound=LogView[Any])


class Rights(Protocol):
    """The part of `Authorization` that services of features use."""

    def check_topic_id(
        self, caller: Caller, operation: Operation, topic_id: bytes, name_of: Callable[[bytes], str | None]
    ) -> None: ...
    def owner_of(self, caller: Caller, topic: str) -> str: ...


def _everyone_may(_owner: str, _topic: str) -> bool:
    return True


class SchemaUse(NamedTuple):
    """A schema as a record names it, by its id or GUID, and the subject that must have it.

    `subject`: None for the subject whose name is `record_prefix` and the full name of the record that the schema
    describes: of an Avro type, of a Protobuf message of the schema, the title of a JSON Schema."""

    schema: int | UUID
    subject: str | None
    record_prefix: str = ""


class SchemaIds(Protocol):
    """The part of the schema registry that publishing asks: whether a subject has a schema."""

    def known(self, use: SchemaUse) -> bool | None:
        """Return whether a version of the subject has the schema; None if this broker must ask first (`resolve`).

        Does not wait. Positive answers are kept, as far as the cache is bounded; negative ones for about a second."""

    async def resolve(self, uses: Collection[SchemaUse]) -> None:
        """Ask the leader of the registry's topic. When it returns, `known` has an answer for each of these uses, for
        about a second at least; the caller may cancel it at any time.

        Raises a `MansioError` if the registry cannot be asked now."""


class NoSchemaIds:
    """`SchemaIds` of a broker without a schema registry: no broker can be asked."""

    __slots__ = ()

    def known(self, use: SchemaUse) -> bool | None:
        """Return None."""

    async def resolve(self, uses: Collection[SchemaUse]) -> None:
        """Raise `LeaderNotAvailable`."""
        del uses
        raise LeaderNotAvailable("this broker has no schema registry")


class FeaturePorts(NamedTuple):
    """What features use of the outside world. `background`: the thread that writes snapshots. `may_write`: whether the
    owner of something stored may write to a topic now (`owner_may_write`). `schema_ids`: of the schema registry."""

    disk: Disk
    background: Background
    scheduler: Scheduler
    clock: Clock
    may_write: Callable[[str, str], bool] = _everyone_may
    schema_ids: SchemaIds = NoSchemaIds()

    def replay(self, partition: Partition, view: V) -> ViewReplay[V]:
        """Keep a view of the log of a partition. Raises `StorageError` and fails the log, if it cannot be read."""
        log = partition.log
        try:
            return ViewReplay(
                view,
                self.disk,
                self.background,
                self.scheduler,
                log,
                is_leader=lambda: partition.is_leader,
                on_damage=partition.report_damage,
            )
        except OSError as error:
            raise log.fail(error, f"cannot read the {view.kind} of {log.directory}") from error
