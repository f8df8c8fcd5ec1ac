"""Defects of the planner of moves, of their execution, and of rolling restarts."""

from __future__ import annotations

from nightly.planted.planted import Defect

PLANNER = "metadata/move_planner.py"
TESTS = "tests/unit/metadata/test_move_planner.py"
MOVES = "tests/unit/cli/test_cluster_moves.py"
RESTARTS = "tests/unit/cli/test_rolling_restart.py"
HOSTS = "tests/unit/metadata/test_host_labels.py"
IMPORT = "tests/unit/metadata/test_single_node_import.py"

MOVE_PLANNER_DEFECTS = (
    Defect(
        "racks forgotten in moves",
        PLANNER,
        "choices = [number for number in held if self._misplacement(number, source, rack) <= 0]",
        "choices = list(held)",
        (f"{TESTS}::test_larger_clusters_are_balanced_once_and_for_all",),
    ),
    Defect(
        "two replicas on one broker",
        PLANNER,
        "while after < len(choices) and not is_free(choices[after], source, target):",
        "while False:",
        (f"{TESTS}::test_larger_clusters_are_balanced_once_and_for_all",),
    ),
    Defect(
        "choices of a rack not updated",
        PLANNER,
        "for slot in placed if is_other_rack else (target,):",
        "for slot in ():",
        (f"{TESTS}::test_larger_clusters_are_balanced_once_and_for_all",),
    ),
    Defect(
        "racks have no bounds",
        PLANNER,
        "return [(level, level + 1) if size > level and rest > 0 else (min(size, level),) * 2 for size in sizes]",
        "return [(0, replication_factor) for _ in sizes]",
        (f"{TESTS}::test_with_three_racks_a_fourth_broker_relieves_its_rack_mate_only",),
    ),
    Defect(
        "moving partitions are moved again",
        PLANNER,
        "if leader >= 0 and not is_moving:",
        "if leader >= 0:",
        (f"{TESTS}::test_a_rebalanced_cluster_needs_no_rebalance_and_no_order_of_arguments_matters",),
    ),
    Defect(
        "brokers that are down get replicas",
        PLANNER,
        "usable = [one for one in brokers if one.is_usable and one.node_id != leaving]",
        "usable = [one for one in brokers if one.node_id != leaving]",
        (f"{TESTS}::test_a_drained_broker_has_nothing_and_others_exchange_nothing",),
    ),
    Defect(
        "larger steps than the difference",
        PLANNER,
        "_OVERSHOOT: Final = 0.9",
        "_OVERSHOOT: Final = 2.5",
        (f"{TESTS}::test_one_partition_larger_than_the_mean_moves_nothing_to_and_fro",),
    ),
    Defect(
        "room of the target not counted",
        PLANNER,
        "if not copies or (has_room and all(into[node_id] < limit for node_id in move.added)):",
        "if not copies or has_room:",
        (f"{TESTS}::test_moves_start_while_brokers_have_room_and_all_end",),
    ),
    Defect(
        "room of the leader not counted",
        PLANNER,
        "has_room = not out[move.leader] or out[move.leader] + copies <= limit",
        "has_room = True",
        (f"{TESTS}::test_moves_start_while_brokers_have_room_and_all_end",),
    ),
    Defect(
        "the throttle is taken off moves that run",
        "cli/admin/cluster_moves.py",
        "if not running():",
        "if True:",
        (f"{MOVES}::test_the_throttle_is_there_as_long_as_moves_run_however_the_command_ends",),
    ),
    Defect(
        "space of moves that run is not reserved",
        "cli/admin/cluster_moves.py",
        "free_bytes[node_id] -= self._left_bytes(move, node_id)",
        "pass",
        (f"{MOVES}::test_a_move_waits_for_room_on_the_disk_and_fails_if_there_is_none",),
    ),
    Defect(
        "a broker is restarted while others are not in sync",
        "cli/admin/rolling_restart.py",
        "lagging = [one for one in partitions if set(one.replicas) - set(one.in_sync_replicas) - {node_id}]",
        "lagging = [one for one in partitions if one is None]",
        (RESTARTS,),
    ),
    Defect(
        "a broker that was not restarted counts as restarted",
        "cli/admin/rolling_restart.py",
        "elif seen.epoch == self._before and not (seen.epoch is None and self._was_away):",
        "elif False:",
        (f"{RESTARTS}::test_a_command_that_restarts_nothing_is_noticed",),
    ),
    Defect(
        "replicas in sync according to any broker",
        "cli/admin/rolling_restart.py",
        "own = [one for one in await self._cluster.partitions(broker=node_id) if node_id in one.replicas]",
        "own = [one for one in await self._cluster.partitions(broker=None) if node_id in one.replicas]",
        (f"{RESTARTS}::test_what_is_in_sync_is_asked_of_the_broker_that_was_restarted",),
    ),
    Defect(
        "two replicas on one host by a move",
        PLANNER,
        "return all(hosts[slot] != host for slot in placed if slot != source)",
        "return True",
        (f"{HOSTS}::test_hosts_are_kept_apart_within_a_rack_too",),
    ),
    Defect(
        "two replicas of a new partition on one host",
        "metadata/topic_plan.py",
        "if taken.get(rack, 0) == level and host not in used:",
        "if taken.get(rack, 0) == level and position not in chosen:",
        (f"{HOSTS}::test_placed_replicas_are_on_different_hosts",),
    ),
    Defect(
        "two replicas on one host by a reassignment",
        "metadata/reassignment.py",
        "_check_hosts(view, name, original, target)",
        "pass",
        (f"{HOSTS}::test_a_reassignment_to_the_host_of_another_replica_is_refused",),
    ),
    Defect(
        "single node valid beside its import",
        "metadata/single_node_import.py",
        "await _mark(source, MovedMark(cluster_id, token))",
        "pass",
        (f"{IMPORT}::test_an_import_that_is_killed_at_any_transaction_is_completed_by_the_next",),
    ),
    Defect(
        "an import that began in one etcd is completed in another one, too",
        "metadata/single_node_import.py",
        "if is_marked:",
        "if False:",
        (f"{IMPORT}::test_a_marked_node_is_imported_into_no_other_etcd",),
    ),
)
