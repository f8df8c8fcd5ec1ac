"""The leader's state of its replicas compared with a second implementation that uses plain sets."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mansio.state.replica import ReplicationProgress
from support.tiers import examples

LEADER = 1
OTHERS = (2, 3, 4)
SETS = st.sets(st.sampled_from(OTHERS)).map(lambda others: frozenset({LEADER, *others}))


class ReplicaModel(RuleBasedStateMachine):
    """`reported`: what each follower sent last in this leader epoch, and in which session."""

    @initialize(in_sync=SETS, own=st.integers(0, 20), known=st.integers(0, 20), least=st.integers(1, 4))
    def begin(self, in_sync: frozenset[int], own: int, known: int, least: int) -> None:
        self.epoch = 5
        self.open = True
        self.least = least
        self.own_end = own
        self.leader_end = own + 3
        self.high_watermark = min(known, own)
        self.now = 0.0
        self.new_view(in_sync)

    def new_view(self, in_sync: frozenset[int]) -> None:
        self.reported: dict[int, tuple[int, int]] = {}
        self.best: dict[int, int] = {}
        self.committed = in_sync
        self.pending: frozenset[int] = frozenset()
        self.epoch_start_offset = self.leader_end
        self.view = ReplicationProgress(
            LEADER,
            self.epoch,
            in_sync,
            self.high_watermark,
            durable_end=self.own_end,
            epoch_start_offset=self.epoch_start_offset,
            replicas=(LEADER, *OTHERS),
            min_insync_replicas=self.least,
            is_session_valid=lambda: self.open,
        )
        self.look()

    def look(self) -> bool:
        """The rule: the lowest durable end of all who have to have a record, if anything may be committed at all."""
        members = (self.committed | self.pending) - {LEADER}
        ends = [self.own_end, *(self.reported.get(node, (0, -1))[1] for node in members)]
        before = self.high_watermark
        if self.open and len(self.committed) >= self.least:
            self.high_watermark = max(before, min(ends))
        return self.high_watermark > before

    @rule(more=st.integers(1, 5))
    def append(self, more: int) -> None:
        self.leader_end += more

    @rule(part=st.floats(0, 1))
    def sync(self, part: float) -> None:
        self.own_end += int((self.leader_end - self.own_end) * part)
        assert self.view.on_local_flush(self.own_end) == self.look()

    @rule(node=st.sampled_from(OTHERS), back=st.integers(0, 6), session=st.integers(1, 3))
    def fetch(self, node: int, back: int, session: int) -> None:
        end = max(0, self.leader_end - back)
        self.now += 1
        moved = self.view.on_follower_fetch(node, session, end, self.leader_end, self.now)
        if session >= self.reported.get(node, (0, 0))[0]:
            self.reported[node] = (session, end)
            self.best[node] = max(self.best.get(node, -1), end)
        assert moved == self.look()

    @precondition(lambda self: not self.pending)
    @rule(wanted=SETS)
    def propose(self, wanted: frozenset[int]) -> None:
        """As the ISR manager does: only those may come in who may join."""
        joining = {node for node in wanted - self.committed if self.view.can_join_isr(node)}
        target = (wanted & self.committed) | joining | {LEADER}
        self.pending = target
        self.view.propose_isr(target)

    def forget(self, gone: frozenset[int]) -> None:
        """Who was taken out comes back only by asking again."""
        for node in gone & self.reported.keys():
            self.reported[node] = (self.reported[node][0], -1)

    @precondition(lambda self: self.pending)
    @rule(happened=st.booleans())
    def decided(self, happened: bool) -> None:
        now = self.pending if happened else self.committed
        self.forget(self.committed - now)
        self.committed = now
        self.pending = frozenset()
        assert self.view.on_isr_committed(self.committed, self.now) == self.look()

    @rule(gone=st.sampled_from(OTHERS))
    def controller_takes_one_out(self, gone: int) -> None:
        self.forget(self.committed & {gone})
        self.committed -= {gone}
        self.pending = frozenset()
        assert self.view.on_isr_committed(self.committed, self.now) == self.look()

    @rule(open_=st.booleans())
    def is_session_valid(self, open_: bool) -> None:
        self.open = open_
        assert self.view.advance() == self.look()

    @rule(least=st.integers(1, 4))
    def require(self, least: int) -> None:
        self.least = least
        assert self.view.set_min_insync_replicas(least) == self.look()

    @rule()
    def lead_again(self) -> None:
        """A new epoch: nothing that was sent in the one before counts."""
        self.epoch += 1
        self.new_view(self.committed)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "view"):
            return
        assert self.view.high_watermark == self.high_watermark
        assert self.view.in_sync == self.committed
        assert self.view.is_high_watermark_known == (self.high_watermark >= self.epoch_start_offset)

    @invariant()
    def only_who_has_all_that_was_there_when_the_epoch_began_may_join(self) -> None:
        if not hasattr(self, "view") or self.pending:
            return
        needed = max(self.high_watermark, self.epoch_start_offset)
        for node in OTHERS:
            has_it = self.reported.get(node, (0, -1))[1] >= needed
            assert self.view.can_join_isr(node) == (has_it and node not in self.committed)

    @invariant()
    def everybody_who_counts_has_what_is_committed_in_this_epoch(self) -> None:
        if not hasattr(self, "view") or self.high_watermark <= self.epoch_start_offset:
            return
        for node in (self.committed | self.pending) - {LEADER}:
            assert self.best.get(node, -1) >= self.high_watermark


ReplicaModel.TestCase.settings = settings(
    max_examples=examples(20, 100), stateful_step_count=40, deadline=None
)
test_the_view_follows_the_rule = ReplicaModel.TestCase


def test_a_replica_lags_when_it_did_not_have_all_for_so_long() -> None:
    view = ReplicationProgress(1, 1, frozenset({1, 2}), 0, replicas=(1, 2), now_ms=0)
    view.on_follower_fetch(2, 1, 0, 10, 100)  # it has nothing yet, and is given 10
    assert view.lagging_replicas(1000, 1000, 20) == frozenset()
    assert view.lagging_replicas(1001, 1000, 20) == {2}
    view.on_follower_fetch(2, 1, 10, 20, 900)  # all that there was at 100
    assert view.lagging_replicas(1100, 1000, 20) == frozenset()
    assert view.lagging_replicas(1101, 1000, 20) == {2}
    assert view.lagging_replicas(9999, 1000, 10) == frozenset(), (
        "whoever has all is not behind, however long nobody writes"
    )


def test_a_single_node_continues_in_a_later_epoch_and_never_in_an_earlier_one() -> None:
    progress = ReplicationProgress(1, 3, frozenset({1}), 5)
    progress.continue_in_epoch(4)
    assert (progress.leader_epoch, progress.high_watermark) == (4, 5)
    progress.continue_in_epoch(2)
    assert progress.leader_epoch == 4, "an epoch that has ended is not used again"
