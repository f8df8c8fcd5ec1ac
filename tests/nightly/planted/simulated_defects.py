"""Defects of one line in the cluster rules of docs/how-to/cluster.md that the simulator has to find.

`python -m nightly.planted.simulated_defects [NAME ...] --seeds 0:500`, with `src` and `tests` on PYTHONPATH, prints the
seed that finds each.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from nightly.planted.planted import Defect, plant
from support.paths import ROOT

SEARCHED_MAX = 500
"""So many histories are enough to find each of them, whichever they are."""
RUN_S_MAX = 3600
_FOUND = re.compile(r"^seed (\d+): (.*)$", re.MULTILINE)


class SimulatedDefect(NamedTuple):
    """`seed`: a history that it breaks, known from a search. Other code makes other histories of the same seeds, so
    that it may be one of those behind it."""

    seed: int
    defect: Defect


class Found(NamedTuple):
    """On which seed, after how many, and what was seen."""

    seed: int
    how: str


def rule(seed: int, name: str, file: str, line: str, planted: str) -> SimulatedDefect:
    return SimulatedDefect(seed, Defect(name, file, line, planted, ()))


MANAGER = "broker/features/delays/delay_manager.py"
VIEW = "broker/features/delays/delayed_records.py"
REPLAY = "broker/log_view/replay.py"
DELIVERY = "broker/features/delays/delayed_delivery.py"

DEFECTS = (
    rule(
        0,
        "ack before the high watermark",
        "broker/partition/partition.py",
        "if end_offset <= self.replica.high_watermark:",
        "if end_offset <= self.log.end_offset:",
    ),
    rule(
        0,
        "what a follower was sent counts as synced",
        "broker/partition/partition.py",
        "node_id, broker_epoch, offset, log.end_offset, now_ms, wanted.log_start_offset",
        "node_id, broker_epoch, log.end_offset, log.end_offset, now_ms, wanted.log_start_offset",
    ),
    rule(
        9,
        "the leader counts what it has not synced",
        "broker/partition/partition.py",
        "return AppendResult(base_offset, end_offset, append_time_ms, False)",
        "self.group_commit.request_flush(self.log, urgent=True); self._on_durable(self.log.end_offset); "
        "return AppendResult(base_offset, end_offset, append_time_ms, False)",
    ),
    rule(
        0,
        "nothing is synced at all",
        "storage/flush_state.py",
        "self.active_file.sync()",
        "pass",
    ),
    rule(
        0,
        "truncate to the high watermark",
        "broker/partition/partition.py",
        "replica = FollowerReplica(leader, leader_epoch, known, log.durable_end_offset)",
        "log.unfinished_job_count or log.truncate_to(known); "
        "replica = FollowerReplica(leader, leader_epoch, known, log.durable_end_offset)",
    ),
    rule(
        0,
        "end of the last fetched epoch unchecked",
        "broker/partition/partition.py",
        "if epoch != wanted.last_fetched_epoch or end < offset:",
        "if epoch != wanted.last_fetched_epoch:",
    ),
    rule(
        0,
        "a new leader commits before all in sync have fetched in its epoch",
        "state/replica.py",
        "self.durable_end = UNKNOWN",
        "self.durable_end = 1 << 60",
    ),
    rule(
        12,
        "shrinking counts before it is committed",
        "state/replica.py",
        "others = (self.in_sync | (self.pending_in_sync or frozenset())) - {self.leader}",
        "others = (self.pending_in_sync or self.in_sync) - {self.leader}",
    ),
    rule(
        0,
        "commits below min.insync.replicas",
        "state/replica.py",
        "if lowest <= self.high_watermark or self.is_under_min_isr:",
        "if lowest <= self.high_watermark:",
    ),
    rule(
        0,
        "elected outside the in-sync set",
        "metadata/controller_plan.py",
        "return [replica for replica in partition.replicas if replica in partition.isr]",
        "return list(partition.replicas)",
    ),
    rule(
        0,
        "a leader goes on in the epoch from before its restart",
        "metadata/cluster_view.py",
        "return broker is not None and broker.epoch == partition.leader_broker_epoch",
        "return broker is not None",
    ),
    rule(
        26,
        "a lost log stays in sync",
        "metadata/broker_lifecycle.py",
        "await self._leave_isrs()",
        "pass",
    ),
    rule(
        0,
        "followers forget who wrote",
        "broker/partition/partition.py",
        "after(header, header.base_offset, contents)",
        "pass",
    ),
    rule(
        0,
        "readers see what is not committed",
        "broker/partition/partition.py",
        "end = self.replica.high_watermark",
        "end = self.log.end_offset",
    ),
    rule(
        10,
        "session deadline ignored",
        "metadata/session.py",
        "return self.epoch != 0 and not self.has_ended and now < self._valid_until",
        "return self.epoch != 0 and not self.has_ended",
    ),
    rule(
        190_000,
        "a session ends early without a confirmation",
        "metadata/hand_over/hand_over.py",
        "return bool(response.confirmed)",
        "return True",
    ),
    rule(
        190_019,
        "a session ends early whatever witnesses there are",
        "metadata/hand_over/suspicions.py",
        "return 2 * count > len(self._active) + lately",
        "return count > 1",
    ),
    rule(
        190_014,
        "sessions end early again and again",
        "metadata/hand_over/suspicions.py",
        "return epoch != 0 and node_id in self._active and now - since >= self._ttl_s",
        "return epoch != 0 and node_id in self._active",
    ),
    rule(
        190_003,
        "the controller key is left to a broker without a session",
        "metadata/hand_over/hand_over.py",
        "if controller is not None and controller.node_id == node_id:",
        "if False:",
    ),
    rule(
        200_002,
        "a partition of a group is given while another member has yet to give it up",
        "state/consumer_group/stored_state.py",
        "return self.current.assigned | self.current.pending",
        "return self.current.assigned",
    ),
    rule(
        400008,
        "what may have been leased before a loss is not withheld",
        "state/share_partition/snapshot.py",
        "_withhold(in_flight, min(state.lease_bound, log_end), now_ms + max(state.withheld_ms, 0), own)",
        "pass",
    ),
    rule(
        2_000_000,
        "deduplication window lost at a change of leader",
        "broker/features/deduplication/deduplication_view.py",
        "content = decode_dedup_control(batch)",
        "content = None",
    ),
    rule(
        2_000_000,
        "deduplication window lost at a start from a snapshot",
        "broker/features/deduplication/window.py",
        "window._shards.append(_Shard.from_bytes(data[position:end], rows))",
        "window._shards.append(_Shard(0))",
    ),
    rule(
        2_000_000,
        "deduplication ids deleted by retention",
        "broker/features/deduplication/deduplicator.py",
        "waiting += found",
        "waiting += []",
    ),
    rule(
        1_000_008,
        "what is stored is found by its offset, whatever the partition",
        MANAGER,
        "self._cached: dict[int, StoredRecords] = {}",
        'self._cached: dict[int, StoredRecords] = globals().setdefault("_all_cached", {})',
    ),
    rule(
        1_000_008,
        "a delivery is valid without its second batch",
        VIEW,
        "self.delivery(control.ids, control.crc)(base_offset)",
        "pending.remove_delivered(control.ids)",
    ),
    rule(
        1_000_000,
        "ids begin again after a restart",
        MANAGER,
        "record = PendingRecord(due_ms, base_offset + index, base_offset, begin, bounds[index + 1] - begin)",
        "record = PendingRecord(due_ms, len(view.pending) + index, base_offset, begin, bounds[index + 1] - begin)",
    ),
    rule(
        1_000_000,
        "a cancellation while records are delivered is lost",
        MANAGER,
        "end_offset = self._append_control(encode_cancelled(known), self.view.cancellation(known))",
        "is_late = (self.view.pending.next_due_ms or 0) <= self.partition.clock.wall_ms(); "
        "end_offset = self._append_control("
        "encode_cancelled(known), self.view.cancellation([] if is_late else known))",
    ),
    rule(
        1_000_000,
        "records that are delivered late are delivered twice",
        MANAGER,
        "self._delivered_end = end_offset",
        "self._delivered_end = end_offset;"
        " due[0].due_ms < now_ms - 2_000 and self.view.pending.replace(due[0])",
    ),
    rule(
        1_000_000,
        "followers keep what was delivered",
        VIEW,
        "self.delivery(control.ids, control.crc)(base_offset)",
        "self.delivery(control.ids[1:], control.crc)(base_offset)",
    ),
    rule(
        1_000_008,
        "a view keeps what was truncated",
        REPLAY,
        "self.snapshots.truncate(end_offset)",
        "return",
    ),
    rule(
        1_000_048,
        "a snapshot is taken between the two batches of a delivery",
        VIEW,
        "return self._expected is None and not self._due_at_once",
        "return not self._due_at_once",
    ),
    rule(
        1_000_000,
        "records are delivered a second early",
        MANAGER,
        "due = view.take_due(limit_ms, records_max, bytes_max)",
        "due = view.take_due(limit_ms + 1000, records_max, bytes_max)",
    ),
    rule(
        1_000_000,
        "the deletion of a schedule is not in the log",
        "broker/features/delays/schedule_manager.py",
        "end_offset = self._append_control(encode_unscheduled([schedule.id]), apply)",
        "apply(0); end_offset = self._partition.end_offset",
    ),
    rule(
        1_000_000,
        "a move is not in the log",
        MANAGER,
        "end_offset = self._append_control(encode_moved(known, moved_ms), apply)",
        "apply(0); end_offset = self.partition.end_offset",
    ),
    rule(
        1_000_000,
        "copies before retention lose a due time",
        MANAGER,
        "control = encode_copied([record.id for record in copied], [record.due_ms for record in copied], batch)",
        "control = encode_copied([record.id for record in copied], [copied[0].due_ms for _ in copied], batch)",
    ),
    rule(
        1_000_004,
        "a leader forgets records whose delivery failed",
        VIEW,
        "pending.replace(record)",
        "pass",
    ),
    rule(
        1_000_001,
        "a follower that leads again goes on from its own clock",
        DELIVERY,
        "self._on_clock_set_back(now_ms)",
        "pass",
    ),
)

RARE = (
    rule(
        9,
        "a failed sync is taken for a good one",
        "storage/log.py",
        'self.fail(error, f"cannot sync {self.directory}")',
        "self.durable_end_offset = work.end_offset",
    ),
    rule(
        0,
        "leader epoch of a follower unchecked",
        "broker/partition/partition.py",
        "if requested_epoch < current:",
        "if False:",
    ),
    rule(
        0,
        "last fetched epoch unchecked",
        "broker/partition/partition.py",
        "if epoch != wanted.last_fetched_epoch or end < offset:",
        "if end < offset:",
    ),
    rule(
        5,
        "growth counts only when committed",
        "state/replica.py",
        "others = (self.in_sync | (self.pending_in_sync or frozenset())) - {self.leader}",
        "others = self.in_sync - {self.leader}",
    ),
    rule(
        0,
        "the dead are kept in the in-sync set",
        "broker/replication/isr_manager.py",
        "return (replica.in_sync - removed) | joining",
        "return replica.in_sync | joining",
    ),
    rule(
        0,
        "a replica joins whatever it has",
        "state/replica.py",
        "and follower.durable_end >= self.high_watermark",
        "or True",
    ),
    rule(
        0,
        "a change overwrites the controller's",
        "broker/replication/isr_manager.py",
        "compares.append(Compare(key, mod_revision=change.before.mod_revision))",
        "compares.append(Compare(key))",
    ),
    rule(
        0,
        "a broker is added in whatever session",
        "broker/replication/isr_manager.py",
        "compares.append(Compare(self._keys.session(node), create_revision=epoch))",
        "pass",
    ),
    rule(
        0,
        "stale broker epoch accepted",
        "broker/services/broker_authenticator.py",
        "return registry is not None and 0 < registry.epoch_of(identity.node_id) == identity.broker_epoch",
        "return True",
    ),
    rule(
        0,
        "waits outlive their leader epoch",
        "broker/partition/partition_waits.py",
        "self.fail(error)",
        "self.wake_all()",
    ),
    rule(
        0,
        "cut where the leader's epoch ended, whatever the own one did",
        "broker/partition/partition.py",
        "end = min(leader_end, own_end)",
        "end = leader_end",
    ),
    rule(
        0,
        "what may have been leased before a loss is given to others at once",
        "state/share_partition/snapshot.py",
        "_withhold(in_flight, min(state.lease_bound, log_end), now_ms + max(state.withheld_ms, 0), own)",
        "_withhold(in_flight, min(state.lease_bound, log_end), now_ms, own)",
    ),
    rule(
        1_000_000,
        "retention does not wait for copies",
        REPLAY,
        "floors.append(self._retained_until[1])",
        "pass",
    ),
    rule(
        1_000_000,
        "a snapshot has what is not committed",
        "broker/log_view/snapshots.py",
        "if self.waiting is not None and self.waiting[0] <= high_watermark:",
        "if self.waiting is not None:",
    ),
)
"""What takes many histories to be seen, or is seen only together with another fault of the program: searched for by
hand, `python -m nightly.planted.simulated_defects --rare`; what is about share groups, from seed 400000 on, and about
delayed records, from 1000000 on."""


def search(defect: Defect, first: int, end: int) -> Found | None:
    """Run histories with the defect in place until one breaks; None when none did."""
    with tempfile.TemporaryDirectory() as directory:
        source = plant(defect, Path(directory))
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))
        }
        environment["PYTHONPATH"] = os.pathsep.join([str(source), str(ROOT / "tests")])
        result = subprocess.run(
            [sys.executable, "-m", "sim.run", "--seeds", f"{first}:{end}"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_S_MAX,
            check=False,
        )
    if result.returncode == 0:
        return None
    found = _FOUND.search(result.stdout)
    assert found is not None, f"{defect.name}: the simulator could not run: {result.stdout}{result.stderr}"
    return Found(int(found[1]), found[2])


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--rare", action="store_true", help="those of RARE instead")
    arguments.add_argument("--seeds", default=f"0:{SEARCHED_MAX}")
    chosen = arguments.parse_args()
    first, _, end = chosen.seeds.partition(":")
    missed = 0
    for _, defect in RARE if chosen.rare else DEFECTS:
        if chosen.names and not any(name in defect.name for name in chosen.names):
            continue
        found = search(defect, int(first), int(end))
        missed += found is None
        outcome = "not found" if found is None else f"seed {found.seed}: {found.how[:160]}"
        print(f"{defect.name}: {outcome}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
