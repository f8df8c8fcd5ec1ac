"""Uses of schemas that publishing asks for: whether a subject has the schema that a record names (`SchemaIds`).

Invariants:
* What a subject has is kept, as far as `KEPT_MAX` allows. That it does not have a schema is answered once after it was
  asked, because the schema may be registered meanwhile.
* The answer is that of the broker that leads the topic of the registry, so a schema is known as soon as its
  registration is answered.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.broker.features.feature_ports import SchemaUse
from mansio.errors import error_for_code
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mansio.broker.coordinator.registry.schema_coordinator import SchemaCoordinator
    from mansio.ports import Clock, Peers

KEPT_MAX: Final = 10_000
ABSENT_S: Final = 1.0
TIMEOUT_MS: Final = 10_000
CLIENT_ID: Final = "mansio-schemas"

CONTAINS: Final = "contains"
"""Operation of DescribeSchemas that a broker asks for."""


class SchemaUses:
    """Answers of one broker about uses of schemas. All methods run on its event loop."""

    def __init__(
        self, coordinator: Callable[[], SchemaCoordinator], *, clock: Clock, peers: Peers | None
    ) -> None:
        """`coordinator`: returns that of this broker; `peers`: None on a single node."""
        self._coordinator = coordinator
        self._clock = clock
        self._peers = peers
        self._kept: dict[SchemaUse, float] = {}
        """When the answer that the subject does not have the schema ends, in monotonic seconds; 0: it has it."""
        self.request_count = 0

    def known(self, use: SchemaUse) -> bool | None:
        """Return whether the subject has the schema; None if that has to be asked."""
        absent_until_s = self._kept.get(use)
        if absent_until_s is None:
            return None
        if absent_until_s == 0:
            return True
        del self._kept[use]
        return False if self._clock.monotonic() < absent_until_s else None

    async def resolve(self, uses: Collection[SchemaUse]) -> None:
        """Ask for uses. Raises a `MansioError` if the registry cannot be asked now."""
        asked = list(uses)
        answers = await self._ask(asked)
        absent_until_s = self._clock.monotonic() + ABSENT_S
        for use, is_there in zip(asked, answers, strict=True):
            self._kept.pop(use, None)
            self._kept[use] = 0 if is_there else absent_until_s
        while len(self._kept) > KEPT_MAX:
            del self._kept[next(iter(self._kept))]

    async def _ask(self, uses: Sequence[SchemaUse]) -> list[bool]:
        coordinator = self._coordinator()
        broker = await coordinator.find_coordinator()
        if broker is None or self._peers is None:
            return await coordinator.contains(uses)
        self.request_count += 1
        arguments = json.dumps({"uses": [encode_use(each) for each in uses]}).encode()
        fields = {"operation": CONTAINS, "subject": None, "arguments": arguments}
        request = messages.encode_request(ApiKey.DESCRIBE_SCHEMAS, 0, 0, CLIENT_ID, fields)
        frame = await self._peers.send(broker.node_id, request, timeout_ms=TIMEOUT_MS)
        _, response = messages.decode_response_frame(ApiKey.DESCRIBE_SCHEMAS, 0, frame)
        if response.error_code:
            raise error_for_code(response.error_code, response.error_message or "")
        return [bool(each) for each in json.loads(response.result)]


def decode_use(found: dict[str, Any]) -> SchemaUse:
    """Return the use of a JSON object. Raises `KeyError`, `TypeError`, `ValueError`, `AttributeError`."""
    schema = UUID(found["guid"]) if "guid" in found else int(found["id"])
    subject, prefix = found["subject"], found["prefix"]
    if not isinstance(subject, str | None) or not isinstance(prefix, str):
        raise TypeError("names are strings")
    return SchemaUse(schema, subject, prefix)


def encode_use(use: SchemaUse) -> dict[str, Any]:
    """Return a use as a JSON object."""
    schema = {"guid": str(use.schema)} if isinstance(use.schema, UUID) else {"id": use.schema}
    return {**schema, "subject": use.subject, "prefix": use.record_prefix}
