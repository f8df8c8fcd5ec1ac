"""The architecture as tests: arrows point down, and the rooms the simulator runs touch the world through
ports only."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGE = ROOT / "src" / "mansio"

PURE = (
    "wire",
    "state",
    "metadata/model.py",
    "metadata/controller/failure_detector.py",
    "metadata/controller_plan.py",
    "metadata/move_planner.py",
    "metadata/session.py",
    "metadata/topic_plan.py",
    "broker/features/deduplication/dedup_control_records.py",
    "broker/features/deduplication/window.py",
    "broker/features/delays/delay_control_records.py",
    "broker/features/delays/pending_records.py",
    "broker/features/delays/recurrence.py",
    "broker/features/delays/schedules.py",
    "broker/features/priorities/priority_index.py",
    "broker/features/priorities/priority_shares.py",
)
"""Neither an effect nor a port: bytes and values in, bytes and values out."""

THROUGH_PORTS = (
    "storage",
    "metadata/transactions.py",
    "metadata/controller/controller.py",
    "metadata/broker_lifecycle.py",
    "metadata/metadata_store.py",
    "metadata/image.py",
    "broker/features",
    "broker/log_view",
    "broker/partition",
    "broker/replication/leadership_applier.py",
    "broker/replication/isr_manager.py",
    "broker/coordinator",
    "node/cluster_member.py",
    "node/broker_runtime.py",
    "broker/replication/replica_manager.py",
    "broker/replication/replica_fetcher.py",
)
"""Disk, clock, timers, threads and chance only as objects of `mansio.ports`."""

WITH_THREADS = ("broker/coordinator/checkpoint.py", "broker/partition/partition_set.py")
"""They run work on threads of their own (`mansio.host.run_in_thread`), but outside simulations only."""

WORLD = frozenset(
    {
        "asyncio",
        "concurrent",
        "fcntl",
        "glob",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
        "queue",
        "random",
        "sched",
        "secrets",
        "select",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "uvloop",
    }
)
"""Modules that reach disk, time, chance, threads or the network."""

HOST = frozenset(
    f"mansio.host{module}"
    for module in (
        "",
        ".asyncio_loop",
        ".clock",
        ".disk",
        ".file_descriptors",
        ".host_ports",
        ".run_in_thread",
        ".threads",
    )
)
"""The real implementations of the ports. `mansio.host.atomic_file` uses the port `Disk` only."""

WORLDLY_CALLS = frozenset({"open", "datetime.now", "datetime.utcnow", "uuid.uuid4", "uuid4"})


def modules(*rooms: str) -> list[Path]:
    found: list[Path] = []
    for room in rooms:
        path = PACKAGE / room
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []
    return found


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from running_nodes(other)
            continue
        yield node
        yield from running_nodes(node)


def worldly(source: str, forbidden: frozenset[str] | set[str]) -> list[str]:
    """What in `source` reaches the world: imports from `forbidden`, calls from `WORLDLY_CALLS`."""
    found = []
    for node in running_nodes(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in WORLDLY_CALLS:
            found.append(f"line {node.lineno}: calls {ast.unparse(node.func)}")
        worldly_names = [name for name in names if {name, name.partition(".")[0]} & forbidden]
        found += [f"line {getattr(node, 'lineno', 0)}: imports {name}" for name in worldly_names]
    return found


def worldly_modules(rooms: tuple[str, ...], forbidden: frozenset[str] | set[str]) -> dict[str, list[str]]:
    """What reaches the world, by module."""
    found = {str(path.relative_to(PACKAGE)): worldly(path.read_text(), forbidden) for path in modules(*rooms)}
    return {module: lines for module, lines in found.items() if lines}


def test_pure_rooms_know_no_disk_clock_chance_thread_or_loop() -> None:
    assert worldly_modules(PURE, WORLD | HOST | {"mansio.ports"}) == {}


def test_simulated_rooms_reach_the_world_through_ports_only() -> None:
    found = worldly_modules(THROUGH_PORTS, WORLD | HOST)
    for module in WITH_THREADS:
        (reached,) = found.pop(module)
        assert reached.endswith("imports mansio.host.run_in_thread")
    assert found == {}


@pytest.mark.parametrize(
    ("source", "reaches"),
    [
        ("import os.path", True),
        ("from time import monotonic", True),
        ("def f():\n    import random", True),
        ("handle = open('x')", True),
        ("from mansio.host.disk import HostDisk", True),
        ("from mansio.host import host", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncio", False),
        ("import struct\nfrom mansio.ports import Disk", False),
        ("log.open(disk)", False),
    ],
)
def test_the_walk_sees_what_reaches_the_world(source: str, reaches: bool) -> None:
    assert bool(worldly(source, WORLD | HOST)) is reaches
