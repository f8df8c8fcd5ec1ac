"""What one broker runs on, as ports: its disk, clocks, chance, loop and threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mansio.ports import Background, Clock, Disk, Random, Scheduler


class HostPorts(NamedTuple):
    """One object to hand over instead of seven. `sync_thread` and the others run one job at a time each."""

    disk: Disk
    clock: Clock
    random: Random
    scheduler: Scheduler
    sync_thread: Background
    file_thread: Background
    compaction_thread: Background
    boot_id: str = ""
    """Of the machine's last start: another one after each. "" where nobody can say."""
