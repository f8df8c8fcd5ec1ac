"""Readers of queues that outlive a failed connection of kombu, until the next connection of the process takes them.

A worker of Celery that lost its connection goes on with the tasks that run, and connects again. Their leases must not
end meanwhile: another worker would start the same tasks.

Invariants:
* A kept reader is taken once, by a connection with the same client. Its client stays open until then.
* A reader that is not taken within `KEPT_S_MAX` leases no more records, and leaves the group when the tasks that run
  are acknowledged.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.celery.client_thread import acquire_client, release_client

if TYPE_CHECKING:
    from mansio.celery.client_thread import ClientOptions, ClientThread
    from mansio.celery.queue_reader import QueueReader

KEPT_S_MAX: Final = 60.0
"""A connection that takes longer to come back finds its leases ended in any case, unless they were very long."""


class _Kept(NamedTuple):
    reader: QueueReader
    options: ClientOptions
    thread: ClientThread


_kept: dict[tuple[ClientOptions, str], _Kept] = {}
"""By client and queue. Only the thread of the worker changes it."""


def keep_reader(options: ClientOptions, reader: QueueReader) -> None:
    """Keep a reader for the next connection. `options`: of its client."""
    previous = take_reader(options, reader.source.queue)
    if previous is not None:
        previous.end()
    thread = acquire_client(options)
    _kept[options, reader.source.queue] = _Kept(reader, options, thread)
    reader.end_after(KEPT_S_MAX)


def take_reader(options: ClientOptions, queue: str) -> QueueReader | None:
    """Remove and return the reader of a queue that was kept, None if there is none of this process."""
    found = _kept.pop((options, queue), None)
    if found is None or not found.thread.is_of_this_process:
        return None
    release_client(found.options, found.thread)
    return found.reader


def running_tags() -> set[str]:
    """Return the delivery tags of the tasks that run on the worker of Celery in this process."""
    state = sys.modules.get("celery.worker.state")
    if state is None:
        return set()
    return {request.message.delivery_tag for request in tuple(state.active_requests)}
