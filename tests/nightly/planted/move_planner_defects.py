"""Defects of the planner of moves."""

from __future__ import annotations

from nightly.planted.planted import Defect

PLANNER = "metadata/move_planner.py"
TESTS = "tests/unit/metadata/test_move_planner.py"

MOVE_PLANNER_DEFECTS = (
    Defect(
        "racks forgotten in moves",
        PLANNER,
        "return target not in placed and self._misplacement(number, source, target) <= 0",
        "return target not in placed",
        (f"{TESTS}::test_with_three_racks_a_fourth_broker_relieves_its_rack_mate_only",),
    ),
    Defect(
        "two replicas on one broker",
        PLANNER,
        "return target not in placed and self._misplacement(number, source, target) <= 0",
        "return self._misplacement(number, source, target) <= 0",
        (f"{TESTS}::test_a_rebalanced_cluster_needs_no_rebalance_and_no_order_of_arguments_matters",),
    ),
    Defect(
        "mean over all racks",
        PLANNER,
        "sum(number * self._bounds[factor][rack][1] for factor, number in counted.items())",
        "sum(number * factor for factor, number in counted.items())",
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
        (f"{TESTS}::test_a_broker_that_is_down_keeps_its_replicas_and_gets_none",),
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
)
