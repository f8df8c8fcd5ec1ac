"""Members of a consumer group (KIP-848) in a simulated cluster.

A member that is told to give a partition up commits once more what it has read of it, as clients do, and says then that
it let go: until it has said so nobody else may have it.

What must be true, for each partition, is what `GroupChecker` has for classic groups, with the member's epoch for the
generation: of one epoch one member has it; who takes it over finds at least what was committed before it asked; nothing
of an older epoch is committed after that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.wire.api_versions import ApiKey
from sim.clients import TOPIC, commit_of
from sim.members import NO_COORDINATOR, REBALANCE_MS, UNKNOWN_MEMBER, Member

if TYPE_CHECKING:
    from sim.members import GroupChecker
    from sim.world import World

FENCED_EPOCH: Final = 110
FIRST_SEED: Final = 200_000
"""Histories from this seed on have members of this kind in the place of classic ones; those before are as they were."""


class NextMember(Member):
    """One member; each round of its loop is a heartbeat, and a commit of every partition it has."""

    def __init__(self, world: World, group: str, number: int, checker: GroupChecker) -> None:
        self.epoch = 0
        self.is_full_request = True
        self.sends_owned = False
        self.positions: dict[int, int | None] = {}  # of what it has; None: not asked for yet
        self.leaving: dict[int, int] = {}  # told to be given up, and not committed for the last time
        self.starts = 0
        self.topic_id = b""
        super().__init__(world, group, number, checker)
        self._start_again()

    def _start_again(self) -> None:
        """As a process that was started again: the member of before sends nothing any more."""
        self.starts += 1
        self.member_id = f"{self.name} {self.starts}"
        self._forget()

    def _forget(self) -> None:
        self.epoch, self.is_full_request = 0, True
        self.positions = {}
        self.leaving = {}

    async def _run(self) -> None:
        await self.find_coordinator(self.group)
        while not self.world.over:
            interval_ms = await self._heartbeat()
            if interval_ms is None:
                await self.sleep(self.random.uniform(20, 200))
                continue
            if await self._go_on():
                self.good_at_ms = self.world.simulation.now_ms
            await self.sleep(self.random.uniform(0.1, 1.0) * interval_ms)
            if self.random.random() < 0.02:
                self._start_again()

    async def _failed(self, code: int | None) -> None:
        self.last_error = "no answer" if code is None else code
        self.is_full_request = True
        if code in (UNKNOWN_MEMBER, FENCED_EPOCH):
            self._forget()
        if code is None or code in NO_COORDINATOR:
            await self.find_coordinator(self.group)

    def _request(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "group_id": self.group,
            "member_id": self.member_id,
            "member_epoch": self.epoch,
            "topic_partitions": None,
        }
        if self.is_full_request:
            fields |= {
                "rebalance_timeout_ms": REBALANCE_MS,
                "subscribed_topic_names": [TOPIC] if self.random.random() < 0.5 else [],
                "subscribed_topic_regex": None,
            }
            if not fields["subscribed_topic_names"]:
                fields["subscribed_topic_regex"] = f"{TOPIC}|nothing.*"
            else:
                fields["subscribed_topic_regex"] = ""
        if self.is_full_request or self.sends_owned:
            owned = sorted({**self.positions, **self.leaving})
            fields["topic_partitions"] = [{"topic_id": self.topic_id, "partitions": owned}] if owned else []
        return fields

    async def _heartbeat(self) -> float | None:
        """How long until the next one; None when something was in the way."""
        sent_owned, before = self.sends_owned and not self.leaving, self.epoch
        answer = await self.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, self._request())
        if answer is None or answer.error_code:
            await self._failed(None if answer is None else answer.error_code)
            return None
        self.is_full_request = False
        self.sends_owned = self.sends_owned and not sent_owned
        self.epoch = answer.member_epoch
        if answer.assignment is not None:
            self.sends_owned = True
            for each in answer.assignment.topic_partitions:
                self.topic_id = each.topic_id
            owned = sorted(index for each in answer.assignment.topic_partitions for index in each.partitions)
            if self.epoch == before:
                self.leaving |= {
                    index: position
                    for index, position in self.positions.items()
                    if index not in owned and position is not None
                }
            self.positions = {index: self.leaving.pop(index, self.positions.get(index)) for index in owned}
        for index in self.positions:
            self.checker.owns(index, self.epoch, self.member_id)
        return float(answer.heartbeat_interval_ms)

    async def _go_on(self) -> bool:
        """Commit in every partition it has, after asking where to begin; whether all that went well."""
        while self.leaving:
            if self.random.random() < 0.3:
                return True  # it takes its time
            index, position = self.leaving.popitem()
            if not await self._commit(index, position + 1):
                return False
        for index in list(self.positions):
            if (begin := self.positions[index]) is None:
                at_least = self.checker.asks(index)
                begin = await self._position(index)
                if begin is None or self.world.is_misled(self.node_id):
                    return False
                self.checker.begins(index, self.epoch, begin, at_least)
            self.positions[index] = begin + 1
            if not await self._commit(index, begin + 1):
                return False
        return True

    async def _position(self, index: int) -> int | None:
        topics = [{"name": TOPIC, "partition_indexes": [index]}]
        wanted = {"member_id": self.member_id, "member_epoch": self.epoch, "topics": topics}
        fields = {"groups": [{"group_id": self.group, **wanted}], "require_stable": True}
        answer = await self.call(ApiKey.OFFSET_FETCH, 9, fields)
        if answer is None or answer.groups[0].error_code:
            await self._failed(None if answer is None else answer.groups[0].error_code)
            return None
        offset: int = answer.groups[0].topics[0].partitions[0].committed_offset
        return offset

    async def _commit(self, index: int, offset: int) -> bool:
        sent_ms, epoch = self.world.simulation.now_ms, self.epoch
        self.checker.tries(index, offset)
        fields = commit_of(self.group, index, offset, generation=epoch, member_id=self.member_id)
        answer = await self.call(ApiKey.OFFSET_COMMIT, 9, fields)
        code = None if answer is None else answer.topics[0].partitions[0].error_code
        if code != 0:
            await self._failed(code)
            return False
        self.checker.committed(index, epoch, offset, sent_ms)
        return True
