"""Defects of one line in reassignments that their model and tests have to find."""

from __future__ import annotations

from nightly.planted.planted import Defect

MODEL = ("tests/unit/metadata/test_reassignment.py",)
MANAGER = ("tests/unit/broker/test_replica_manager.py",)
DUE = "tests/unit/metadata/test_due_partitions.py"
ORPHANS = ("tests/unit/broker/test_orphaned_directories.py",)
COSTS = ("tests/unit/metadata/test_many_partitions_costs.py",)
RULES = "metadata/reassignment.py"
CONTROLLER = "metadata/controller/controller.py"

REASSIGNMENT_DEFECTS = (
    Defect(
        "a move ends before an added replica is in sync",
        RULES,
        "if not in_sync.issuperset(partition.adding) or len(in_sync) < _needed_in_sync(topic, len(target)):",
        "if len(in_sync) < _needed_in_sync(topic, len(target)):",
        MODEL,
    ),
    Defect(
        "a move ends with a minority in sync",
        RULES,
        "if not in_sync.issuperset(partition.adding) or len(in_sync) < _needed_in_sync(topic, len(target)):",
        "if not in_sync.issuperset(partition.adding):",
        MODEL,
    ),
    Defect(
        "the leader epoch stays when a replica is removed",
        RULES,
        "return after._replace(leader_epoch=partition.leader_epoch + bool(removed))",
        "return after",
        MODEL,
    ),
    Defect("a removed replica goes on leading", RULES, "if leader in removed:", "if False:", MODEL),
    Defect(
        "a replica that is not in sync leads after a move",
        RULES,
        "leader = next((one for one in replicas if one in in_sync and view.may_lead(one)), NO_LEADER)",
        "leader = next((one for one in replicas if view.may_lead(one)), NO_LEADER)",
        MODEL,
    ),
    Defect(
        "a broker that is down leads after a move",
        RULES,
        "leader = next((one for one in replicas if one in in_sync and view.may_lead(one)), NO_LEADER)",
        "leader = next((one for one in replicas if one in in_sync), NO_LEADER)",
        MODEL,
    ),
    Defect(
        "a removed replica stays in sync",
        RULES,
        "in_sync = tuple(replica for replica in partition.isr if replica in replicas)",
        "in_sync = partition.isr",
        MODEL,
    ),
    Defect(
        "a move is cancelled although only added replicas are in sync",
        RULES,
        "if partition.isr and not in_sync:",
        "if False:",
        MODEL,
    ),
    Defect(
        "the old replicas are removed at once",
        RULES,
        "removing = tuple(replica for replica in original if replica not in target)",
        "removing: tuple[int, ...] = ()",
        MODEL,
    ),
    Defect(
        "a new target takes added replicas for old ones",
        RULES,
        "original = original_of(partition)",
        "original = partition.replicas",
        MODEL,
    ),
    Defect(
        "an added broker may be down",
        RULES,
        "if replica not in original and not view.may_lead(replica):",
        "if False:",
        MODEL,
    ),
    Defect(
        "the session of an added broker does not count",
        RULES,
        "required = {*adding, *({after.leader, before.leader} if after.leader != before.leader else ())}",
        "required = {after.leader, before.leader} if after.leader != before.leader else set()",
        MODEL,
    ),
    Defect(
        "fewer replicas than min.insync.replicas",
        RULES,
        "if len(target) < min(in_sync_min, len(original)):",
        "if False:",
        MODEL,
    ),
    Defect(
        "the replication factor rises before the move ends",
        RULES,
        "return len(partition.replicas) - max(len(partition.adding), len(partition.removing))",
        "return len(partition.replicas) - len(partition.removing)",
        MODEL,
    ),
    Defect(
        "a move ends below the replication factor",
        RULES,
        "if topic.replication_factor > len(target):",
        "if False:",
        MODEL,
    ),
    Defect(
        "the data of a replica that is assigned again are deleted",
        "broker/replication/replica_manager.py",
        "return opened is not None and self._node_id not in state.replicas",
        "return opened is not None",
        MANAGER,
    ),
    Defect(
        "a lost log is replaced before the broker has registered",
        "broker/replication/replica_manager.py",
        "return self._node_id not in state.isr and self._has_session()",
        "return self._node_id not in state.isr",
        MANAGER,
    ),
    Defect(
        "a quarantined directory of a removed replica stays",
        "broker/maintenance/orphaned_directories.py",
        'for each in (index, f"{index}{DAMAGED_SUFFIX}")',
        "for each in (index,)",
        ORPHANS,
    ),
    Defect(
        "the controller does not decide about changed partitions",
        CONTROLLER,
        "self._due.add_changed(change)",
        "pass",
        COSTS,
    ),
    Defect(
        "the controller does not decide again when sessions change",
        CONTROLLER,
        "if decided_on != self._decided_on:",
        "if False:",
        ("tests/unit/metadata/test_controller.py",),
    ),
    Defect(
        "postponed ends of moves are forgotten",
        CONTROLLER,
        "self._to_finish.add(topic, (index,))",
        "pass",
        COSTS,
    ),
    Defect(
        "removals that wait for elections are forgotten",
        CONTROLLER,
        "self._due.add_decided(due.changes, self._state.topics_by_id)",
        "pass",
        COSTS,
    ),
    Defect(
        "data of replicas are deleted under older metadata",
        "broker/maintenance/orphaned_directories.py",
        "self._move_replica(name, index, mismatch)",
        "self._move_replica(name, index)",
        ORPHANS,
    ),
    Defect(
        "a replication factor is forgotten beside elections",
        "metadata/controller/controller.py",
        "self._due.add(factor.topic.name, range(len(factor.topic.partitions)))",
        "pass",
        (f"{DUE}::test_a_replication_factor_is_stored_although_elections_come_first",),
    ),
    Defect(
        "a broker that leaves keeps its roles",
        "broker/replication/replica_manager.py",
        "if has_many and not self._stopped:",
        "if has_many:",
        MANAGER,
    ),
)
