"""Members of a classic consumer group in a simulated cluster: they join, share the partitions, commit, are fenced and
join again.

What must be true, for each partition: of one generation one member has it; who takes it over finds at least what was
committed before it asked; nothing of an older generation is committed after that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.wire.api_versions import ApiKey
from sim.clients import TOPIC, Client, commit_of

if TYPE_CHECKING:
    from sim.world import World

SESSION_MS: Final = 2500
REBALANCE_MS: Final = 1500
MEMBER_ID_REQUIRED: Final = 79
UNKNOWN_MEMBER: Final = 25
NO_COORDINATOR: Final = frozenset({14, 15, 16})
PARTITIONS: Final = (0, 1)


class GroupChecker:
    """See the module. Times are simulated milliseconds."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owners: dict[tuple[int, int], str] = {}
        self._taken: dict[int, tuple[int, float]] = {}
        """Of each partition the newest generation that began to work, and when."""
        self._kept: dict[int, int] = dict.fromkeys(PARTITIONS, -1)
        self._tried: dict[int, int] = dict.fromkeys(PARTITIONS, -1)
        self.acknowledged = 0

    def owns(self, index: int, generation: int, member: str) -> None:
        """A member received that it has this partition."""
        other = self._owners.setdefault((index, generation), member)
        if other != member:
            self._world.checker.broken(
                f"{member} and {other} have partition {index} in generation {generation}"
            )

    def asks(self, index: int) -> int:
        """What a member that asks now has to find at least."""
        return self._kept[index]

    def begins(self, index: int, generation: int, offset: int, at_least: int) -> None:
        """A member goes on from here."""
        if not at_least <= offset <= self._tried[index]:
            self._world.checker.broken(
                f"generation {generation} finds {offset} of partition {index}; {at_least} was committed, "
                f"{self._tried[index]} tried"
            )
        if generation > self._taken.get(index, (-1, 0.0))[0]:
            self._taken[index] = (generation, self._world.simulation.now_ms)

    def tries(self, index: int, offset: int) -> None:
        self._tried[index] = max(self._tried[index], offset)

    def committed(self, index: int, generation: int, offset: int, sent_ms: float) -> None:
        """A commit that was sent then was acknowledged."""
        newest, since_ms = self._taken[index]
        if newest > generation and since_ms < sent_ms:
            self._world.checker.broken(
                f"generation {generation} commits {offset} of partition {index} at {sent_ms}, {newest} has it "
                f"since {since_ms}"
            )
        self._kept[index] = max(self._kept[index], offset)
        self.acknowledged += 1


class Member(Client):
    """See the module."""

    def __init__(self, world: World, group: str, number: int, checker: GroupChecker) -> None:
        super().__init__(world, f"group {group} {number}")
        self.faithful = True
        self.group = group
        self.checker = checker
        self.member_id = ""
        self.generation = -1
        self.good_at_ms = 0.0
        self.last_error: object = None
        self.run(self._run())

    async def _run(self) -> None:
        await self.find_coordinator(self.group)
        while not self.world.over:
            owned = await self._join()
            if owned is None:
                await self.sleep(self.random.uniform(20, 200))
                continue
            await self._work(owned)

    async def _failed(self, code: int | None) -> None:
        self.last_error = "no answer" if code is None else code
        if code == UNKNOWN_MEMBER:
            self.member_id, self.generation = "", -1
        if code is None or code in NO_COORDINATOR:
            await self.find_coordinator(self.group)

    async def _join(self) -> list[int] | None:
        """The partitions it got, or None when something was in the way."""
        joined = await self.call(
            ApiKey.JOIN_GROUP,
            7,
            {
                "group_id": self.group,
                "session_timeout_ms": SESSION_MS,
                "rebalance_timeout_ms": REBALANCE_MS,
                "member_id": self.member_id,
                "group_instance_id": None,
                "protocol_type": "consumer",
                "protocols": [{"name": "range", "metadata": b""}],
            },
            timeout_ms=2 * SESSION_MS,
        )
        if joined is None or joined.error_code:
            if joined is not None and joined.error_code == MEMBER_ID_REQUIRED:
                self.member_id = joined.member_id
            await self._failed(None if joined is None else joined.error_code)
            return None
        self.member_id, self.generation = joined.member_id, joined.generation_id
        members = sorted(each.member_id for each in joined.members)
        shares = [
            {
                "member_id": member_id,
                "assignment": bytes(index for index in PARTITIONS if index % len(members) == place),
            }
            for place, member_id in enumerate(members)
        ]
        synced = await self.call(
            ApiKey.SYNC_GROUP,
            5,
            {
                "group_id": self.group,
                "generation_id": self.generation,
                "member_id": self.member_id,
                "group_instance_id": None,
                "protocol_type": "consumer",
                "protocol_name": "range",
                "assignments": shares if joined.leader == joined.member_id else [],
            },
        )
        if synced is None or synced.error_code:
            await self._failed(None if synced is None else synced.error_code)
            return None
        owned = list(bytes(synced.assignment))
        for index in owned:
            self.checker.owns(index, self.generation, self.member_id)
        return owned

    async def _work(self, owned: list[int]) -> None:
        """Until its generation is over, or no broker answers."""
        positions: dict[int, int] = {}
        for index in owned:
            at_least = self.checker.asks(index)
            found = await self._position(index)
            if found is None or self.world.is_misled(self.node_id):
                return
            self.checker.begins(index, self.generation, found, at_least)
            positions[index] = found
        while not self.world.over:
            await self.sleep(self.random.uniform(50, 500))
            for index in owned:
                positions[index] += 1
                if not await self._commit(index, positions[index]):
                    return
            if not await self._beat():
                return
            self.good_at_ms = self.world.simulation.now_ms
            if self.random.random() < 0.02:
                self.member_id, self.generation = "", -1  # as one that was started anew
                return

    async def _position(self, index: int) -> int | None:
        topics = [{"name": TOPIC, "partition_indexes": [index]}]
        wanted = {"group_id": self.group, "member_id": None, "member_epoch": -1, "topics": topics}
        answer = await self.call(ApiKey.OFFSET_FETCH, 8, {"groups": [wanted], "require_stable": True})
        if answer is None or answer.groups[0].error_code:
            await self._failed(None if answer is None else answer.groups[0].error_code)
            return None
        offset: int = answer.groups[0].topics[0].partitions[0].committed_offset
        return offset

    async def _commit(self, index: int, offset: int) -> bool:
        sent_ms = self.world.simulation.now_ms
        self.checker.tries(index, offset)
        answer = await self.call(
            ApiKey.OFFSET_COMMIT,
            8,
            commit_of(self.group, index, offset, generation=self.generation, member_id=self.member_id),
        )
        code = None if answer is None else answer.topics[0].partitions[0].error_code
        if code != 0:
            await self._failed(code)
            return False
        self.checker.committed(index, self.generation, offset, sent_ms)
        return True

    async def _beat(self) -> bool:
        answer = await self.call(
            ApiKey.HEARTBEAT,
            4,
            {
                "group_id": self.group,
                "generation_id": self.generation,
                "member_id": self.member_id,
                "group_instance_id": None,
            },
        )
        if answer is None or answer.error_code:
            await self._failed(None if answer is None else answer.error_code)
            return False
        return True
