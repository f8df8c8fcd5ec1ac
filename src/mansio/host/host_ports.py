"""Implementations of the interfaces in `mansio.ports` for one broker: disk, clock, random numbers, scheduler and
threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Background, Clock, Disk, FileWorker, Random, Scheduler


class HostPorts(NamedTuple):
    """Implementations of the interfaces in `mansio.ports` for one broker. Each thread runs one job at a time."""

    disk: Disk
    clock: Clock
    random: Random
    scheduler: Scheduler
    sync_thread: Background
    file_thread: Background
    compaction_thread: Background
    verification_thread: Background
    batch_thread: Background
    request_thread: Background
    password_thread: Background
    boot_id: str = ""
    """Identifies the boot of the machine; "" if unknown."""
    session_clock: Clock | None = None
    """Clock for the sessions of group members, if it is not `clock`: a test broker can advance its clock without
    them."""
    file_worker: FileWorker | None = None
    """Searches files in another process; None for a disk in memory, which is searched in this one."""
    schema_worker: FileWorker | None = None
    """Parses and compares schemas in another process; None to do it in this one."""
    processor_s: Callable[[], float] = lambda: 0.0
    """Returns the processor time that the process has used, in seconds; always 0 if it is not known."""
