"""A schema registry as far as publishing asks it: subjects in a dictionary, and a switch for each way in which a real
one may be slow or fail."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from mansio.broker.features.feature_ports import FeaturePorts
from mansio.node import broker_runtime

if TYPE_CHECKING:
    from collections.abc import Collection
    from uuid import UUID

    import pytest

    from mansio.broker.features.feature_ports import SchemaUse
    from mansio.errors import MansioError


def framed(schema_id: int, content: bytes = b"") -> bytes:
    """A key or value that begins with the id of its schema."""
    return b"\0" + schema_id.to_bytes(4) + content


class FakeSchemaIds:
    """`SchemaIds` of a broker of a test. `subjects`: the schemas of each; `names`: full names of records by schema;
    `error`: raised instead of answers; `remembers`: whether the broker keeps the answers; `asked`: what was asked, in
    order."""

    def __init__(self) -> None:
        self.subjects: dict[str, set[int | UUID]] = {}
        self.names: dict[int | UUID, str] = {}
        self.error: MansioError | None = None
        self.remembers = True
        self.asked: list[list[SchemaUse]] = []
        self._cache: dict[SchemaUse, bool] = {}
        self._lock = threading.Lock()
        self._is_held = False
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    # On the broker's event loop

    def known(self, use: SchemaUse) -> bool | None:
        return self._cache.get(use)

    async def resolve(self, uses: Collection[SchemaUse]) -> None:
        self.asked.append(list(uses))
        event = asyncio.Event()
        with self._lock:
            if self._is_held:
                self._waiting.append((asyncio.get_running_loop(), event))
            else:
                event.set()
        await event.wait()
        if self.error is not None:
            raise self.error
        for use in uses:
            subject = use.subject
            if subject is None and use.schema in self.names:
                subject = use.record_prefix + self.names[use.schema]
            if self.remembers:
                self._cache[use] = use.schema in self.subjects.get(subject or "", ())

    # By the test

    def register(self, subject: str, *schemas: int | UUID) -> None:
        """Register schemas under a subject; what was answered before is forgotten."""
        self.subjects.setdefault(subject, set()).update(schemas)
        self.forget()

    def forget(self) -> None:
        """Empty the cache of the broker."""
        self._cache.clear()

    def hold(self) -> None:
        """Give no answers until `release`."""
        self._is_held = True

    @property
    def waiting_count(self) -> int:
        """Number of requests that wait for an answer, or were given up."""
        return len(self._waiting)

    def release(self) -> None:
        """Answer all requests that wait, and the next ones."""
        with self._lock:
            self._is_held = False
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            loop.call_soon_threadsafe(event.set)


def use_schema_ids(patch: pytest.MonkeyPatch, ids: FakeSchemaIds) -> None:
    """Let the brokers that are started from now on have this registry."""

    def ports(*parts: Any, **named: Any) -> FeaturePorts:
        return FeaturePorts(*parts, **{**named, "schema_ids": ids})

    patch.setattr(broker_runtime, "FeaturePorts", ports)
