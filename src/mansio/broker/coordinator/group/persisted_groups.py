"""What the new kinds of groups (KIP-848, KIP-932) have in common in the coordinator: a request changes the group's
machine, what it changed is appended in the same turn of the loop, and whoever asked is answered once that is committed.

`modern_groups` and `share_groups` say what a machine is asked; this performs it, and knows nothing of either kind.

Always true:
* A machine never stays ahead of its records. If they cannot be appended or committed, or the machine fails halfway, it
  is dropped and made anew of what is stored (`GroupActions.rebuild`): members find out by their next heartbeat.
* Nobody is told of an assignment that is not committed.
* A heartbeat that says nothing new writes nothing, and waits for nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mansio.errors import CoordinatorNotAvailable, MansioError, UnknownMember
from mansio.logs import fields
from mansio.state.classic_group.group import ClassicGroup
from mansio.state.share_group.group import ShareGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.coordinator.group.group_store import Group, GroupEntry, GroupStore
    from mansio.ports import Promise
    from mansio.state.consumer_group.group import ConsumerGroup
    from mansio.state.consumer_group.types import HeartbeatResponse, Records

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class HeartbeatOutcome(NamedTuple):
    """What a heartbeat came to: its answer, and when what it changed is committed; None if it changed nothing."""

    answer: HeartbeatResponse
    committed: Promise[None] | None


class PersistedGroups:
    """See the module. `arm_timer` (the group's timer) and `rebuild` are the coordinator's."""

    def __init__(
        self,
        store: GroupStore,
        *,
        arm_timer: Callable[[GroupEntry], None],
        rebuild: Callable[[GroupEntry], None],
    ) -> None:
        self._store = store
        self._arm = arm_timer
        self._revive = rebuild

    async def heartbeat(
        self, group_id: str, handle: Callable[[GroupEntry], HeartbeatOutcome], *, joins: bool
    ) -> HeartbeatResponse:
        """Have a group take a heartbeat; `joins`: it is made if there is none. Raises what `handle` raises, what the
        commit raises, `UnknownMember` (no such group), and the errors of the coordinator."""
        entry = await self._store.find_or_create(group_id) if joins else self._store.find(group_id)
        if entry is None:
            raise UnknownMember(f"there is no group {group_id!r}")
        try:
            answer, committed = handle(entry)
        finally:
            self._store.drop_if_unused(entry)
        if committed is not None:
            await committed
        elif answer.assignment is not None:
            await self._store.committed(group_id)
        return answer

    def step(self, entry: GroupEntry, group: Group, change: Callable[[], Result]) -> Result:
        """Have the machine change. What it refuses is raised as it is; if it fails halfway, the group is revived and
        `CoordinatorNotAvailable` raised."""
        try:
            return change()
        except MansioError:
            raise
        except Exception as error:
            raise self._failed(entry, group, error) from error

    def tick(self, entry: GroupEntry, group: Group, remove: Callable[[], object]) -> None:
        """The group's timer fired: `remove` whoever has not been heard of, and write that."""
        try:
            remove()
        except MansioError as error:  # revived already, and its sessions begin anew
            logger.warning("members not removed", extra=fields(group=group.group_id, reason=error))
        except Exception as error:  # noqa: BLE001 - nobody waits for it, and the group goes on as it is stored
            self._failed(entry, group, error)
        self._arm(entry)

    def heartbeat_unchanged(
        self, entry: GroupEntry, group: ConsumerGroup | ShareGroup, now_ms: float
    ) -> None:
        """A heartbeat changed nothing that is stored: the timer stays, unless sessions are shorter than when it was
        set."""
        if now_ms + group.settings.session_timeout_ms < entry.timer_due_ms:
            self._arm(entry)

    def write(
        self, entry: GroupEntry, group: Group, records: Records, *, becomes: Group | None = None
    ) -> Promise[None]:
        """Append what a machine has changed, and make it, or what it has become, the group's. Raises what the append
        raises; a group whose own machine has changed in vain is revived."""
        machine = becomes or group
        try:
            written = self._store.append(group.group_id, records, whole=True)
        except MansioError as error:
            self._write_failed(entry, group, error)
            raise
        if machine is not entry.group:
            protocol = _protocol_of(machine)
            logger.info("group protocol changed", extra=fields(group=group.group_id, protocol=protocol))
            entry.resolved = None
            entry.group = machine
        written.add_done_callback(lambda kept: self._settled(entry, machine, kept))
        self._arm(entry)
        return written

    def _settled(self, entry: GroupEntry, machine: Group, kept: Any) -> None:
        try:
            kept.result()
        except MansioError as error:
            self._write_failed(entry, machine, error)

    def _write_failed(self, entry: GroupEntry, machine: Group, error: MansioError) -> None:
        if entry.gone or entry.group is not machine:
            return
        logger.error("group not stored", extra=fields(group=machine.group_id, reason=error))
        self._revive(entry)

    def _failed(self, entry: GroupEntry, group: Group, error: Exception) -> MansioError:
        """The machine, or an assignor it asked, failed halfway."""
        logger.error("group failed", extra=fields(group=group.group_id, reason=error), exc_info=error)
        if entry.group is group and not entry.gone:
            self._revive(entry)
        return CoordinatorNotAvailable(f"group {group.group_id} cannot take this request: {error}")


def _protocol_of(machine: Group) -> str:
    if isinstance(machine, ClassicGroup):
        return "classic"
    return "share" if isinstance(machine, ShareGroup) else "consumer"
