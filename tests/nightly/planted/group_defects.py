"""Defects of one line in consumer groups (KIP-848) that the tests of groups have to find."""

from __future__ import annotations

from nightly.planted.planted import Defect

COORDINATOR = "tests/unit/broker/test_consumer_groups.py"
CHANGE_OVER = "tests/unit/broker/test_consumer_groups_classic.py"
STORIES = "tests/unit/state/test_consumer_group_cases.py"
GROUP_MODEL = "tests/unit/state/test_consumer_group_model.py"
SUBSCRIPTIONS = "tests/unit/broker/test_topic_resolver.py"

GROUP_DEFECTS = (
    Defect(
        "a partition is given while another has yet to give it up",
        "state/consumer_group/stored_state.py",
        "return self.current.assigned | self.current.pending",
        "return self.current.assigned",
        (f"{STORIES}::test_a_partition_goes_to_another_only_when_who_had_it_has_let_go",),
    ),
    Defect(
        "an older epoch is let in with partitions of others",
        "state/consumer_group/group.py",
        "if not has_missed or request.owned is None or not request.owned <= current.assigned:",
        "if not has_missed:",
        (f"{STORIES}::test_a_member_that_missed_an_answer_gets_it_again",),
    ),
    Defect(
        "a target is not stored",
        "state/consumer_group/stored_state.py",
        "self._put(CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER, member.member_id, encode_target_assignment(target))",
        "pass",
        (f"{COORDINATOR}::test_members_carry_on_after_a_restart_and_their_sessions_begin_again",),
    ),
    Defect(
        "a topic grows in the same epoch",
        "state/consumer_group/group.py",
        'digest.update(topic_id + topics.partitions.get(topic_id, 0).to_bytes(4, "big"))',
        "digest.update(topic_id)",
        (f"{COORDINATOR}::test_new_partitions_are_given_out_and_deleted_topics_are_taken_away",),
    ),
    Defect(
        "no session timer after a start",
        "broker/coordinator/group/group_coordinator.py",
        "for entry in list(self.store.entries.values()):",
        "for entry in list(self.store.entries.values())[:0]:",
        (f"{COORDINATOR}::test_members_carry_on_after_a_restart_and_their_sessions_begin_again",),
    ),
    Defect(
        "who is left may not commit in its own generation",
        "state/classic_group/group.py",
        "return self._converted_generations.get(member.member_id, self.generation)",
        "return self.generation",
        (
            f"{CHANGE_OVER}::test_a_classic_group_is_taken_over_by_the_first_member_of_the_new_protocol_and_given_back",
        ),
    ),
)

MORE_GROUP_DEFECTS = (
    Defect(
        "no session timer after a load",
        "broker/coordinator/group/group_coordinator.py",
        "for entry in entries:",
        "for entry in entries[:0]:",
        ("tests/unit/broker/test_consumer_group_moves.py", "tests/unit/broker/test_coordinator_moves.py"),
    ),
    Defect(
        "who is told to give up is not pressed for time",
        "state/consumer_group/group.py",
        "member.revoke_deadline_ms = now_ms + member.metadata.rebalance_timeout_ms",
        "pass",
        (COORDINATOR, GROUP_MODEL),
    ),
    Defect(
        "a member is told before it is committed",
        "broker/coordinator/group/consumer_groups.py",
        "written = self._write_changes(entry, group, records + more, topics)",
        "self._write_changes(entry, group, records + more, topics); written = None",
        (COORDINATOR,),
    ),
    Defect(
        "a machine that could not be stored is kept",
        "broker/coordinator/group/group_actions.py",
        "if entry.is_unloaded or entry.group is not machine:",
        "if True:",
        (COORDINATOR,),
    ),
    Defect(
        "a classic group begins in a generation that its members have",
        "state/consumer_group/group.py",
        "self.group_epoch + 1,",
        "max(each.current.epoch for each in members),",
        (CHANGE_OVER, GROUP_MODEL),
    ),
    Defect(
        "a group that changes to and fro forgets the generations of its members",
        "state/consumer_group/group.py",
        "epoch = classic.generation_of(each)",
        "epoch = classic.generation",
        (CHANGE_OVER, GROUP_MODEL),
    ),
    Defect(
        "names that came since are not looked at",
        "broker/coordinator/group/topic_resolver.py",
        "if seen != now:",
        "if seen < 0:",
        (SUBSCRIPTIONS,),
    ),
)
