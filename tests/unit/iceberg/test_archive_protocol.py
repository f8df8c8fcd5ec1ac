"""Archives that crash, repeat, lose their checkpoint, race and meet a failing catalog: each record once, none missing.

The table, the catalog and the files are real; the log is a fake with holes, and so is Spark: an archive here is a
checkpoint (which batch, from where) and the batch under way.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

from mansio.iceberg import commit
from mansio.iceberg.archive.table import ArchiveTable, open_table
from mansio.iceberg.archive.table_format import BatchPlan
from mansio.iceberg.errors import ConcurrentArchive
from support.iceberg import checksum, expected, held, write_parts
from support.tiers import examples

if TYPE_CHECKING:
    from mansio.iceberg.archive.table_format import WrittenRange

TOPIC = "t"
ARCHIVES = st.integers(0, 1)
FAULTS = ("none", "none", "dead", "lost", "landed", "conflict")
"""`dead`: the archive dies right after the commit. The others are the catalog's."""


@dataclass
class Archive:
    """One running query: what its checkpoint has, and how far it is with the batch."""

    query: str
    table: ArchiveTable
    at: dict[int, int]
    batch: int = 0
    plan: BatchPlan | None = None
    parts: list[WrittenRange] | None = None


class ArchiveProtocol(RuleBasedStateMachine):
    """Two archives of one topic, of which either may run."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="mansio-test-")
        self.table = open_table(None, self.directory, TOPIC, create=True)
        self.log: dict[int, int] = {}
        self.holes: set[tuple[int, int]] = set()
        self.archives: dict[int, Archive] = {}
        self.queries = 0

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    @initialize(count=st.integers(1, 6))
    def begin(self, count: int) -> None:
        self.append(0, count, is_hole=False)
        for which in (0, 1):
            self.start_without_checkpoint(which)

    @rule(partition=st.integers(0, 2), count=st.integers(1, 4), is_hole=st.booleans())
    def append(self, partition: int, count: int, is_hole: bool) -> None:
        """Records come, or offsets that no reader sees (control records, compaction); partitions are added."""
        first = self.log.get(partition, 0)
        self.log[partition] = first + count
        if is_hole:
            self.holes.update((partition, offset) for offset in range(first, first + count))

    @rule(which=ARCHIVES)
    def start_without_checkpoint(self, which: int) -> None:
        """As `mansio pipeline archive` starts: a new query from the table's offsets."""
        table = open_table(None, self.directory, TOPIC)
        committed = table.last_commit()
        self.queries += 1
        self.archives[which] = Archive(
            f"q{self.queries}", table, {} if committed is None else committed.offsets
        )

    @rule(which=ARCHIVES, limit=st.integers(1, 6))
    def write_batch(self, which: int, limit: int) -> None:
        """Spark notes what the next batch is, and its tasks write. What an attempt before wrote stays unreferenced."""
        archive = self.archives[which]
        if archive.plan is None:
            start = {partition: archive.at.get(partition, 0) for partition in self.log}
            end = {partition: min(self.log[partition], start[partition] + limit) for partition in self.log}
            if end == start:
                return
            archive.plan = BatchPlan(archive.query, archive.batch, start, end)
        archive.parts = write_parts(archive.table, archive.plan, frozenset(self.holes))

    @rule(which=ARCHIVES, fault=st.sampled_from(FAULTS))
    def commit_batch(self, which: int, fault: str) -> None:
        """Commit and note it; or crash right after the commit, or meet a catalog that fails once."""
        archive = self.archives[which]
        if archive.plan is None or archive.parts is None:
            return
        try:
            with failing_once(archive.table, fault), mock.patch.object(commit, "COMMIT_RETRY_BACKOFF_S", 0):
                archive.table.commit(archive.plan, archive.parts)
        except ConcurrentArchive:
            self.start_without_checkpoint(which)
            return
        archive.parts = None
        if fault != "dead":  # else its checkpoint does not say so: the batch is written and committed again
            archive.at, archive.batch, archive.plan = archive.plan.end, archive.batch + 1, None

    @rule()
    def maintain(self) -> None:
        """Another program commits a snapshot that changes no row."""
        table = open_table(None, self.directory, TOPIC)
        with table.transaction() as change:
            change.update_snapshot().merge_append().commit()

    @invariant()
    def every_record_below_the_offsets_is_there_once(self) -> None:
        before = self.table.iceberg.metadata_location
        self.table.refresh()
        if self.table.iceberg.metadata_location == before:
            return
        committed = self.table.last_commit()
        want = expected({} if committed is None else committed.offsets, frozenset(self.holes))
        rows = held(self.table)
        assert rows == want
        assert checksum(rows) == checksum(want)


class failing_once:  # noqa: N801  # reads like a function
    """The catalog's next commit fails: before it landed, after it landed with the answer lost, or by a conflict."""

    def __init__(self, table: ArchiveTable, fault: str) -> None:
        self.catalog = table.iceberg.catalog
        self.fault = fault if fault in ("lost", "landed", "conflict") else ""

    def __enter__(self) -> None:
        original = self.catalog.commit_table
        self.patch = mock.patch.object(self.catalog, "commit_table", original)

        def fail(*given: Any, **_: Any) -> Any:
            self.patch.stop()
            if self.fault == "conflict":
                raise CommitFailedException("Requirement failed: branch main has changed")
            if self.fault == "landed":
                original(*given)
            raise CommitStateUnknownException("the connection was lost")

        if self.fault:
            self.patch = mock.patch.object(self.catalog, "commit_table", fail)
            self.patch.start()

    def __exit__(self, *_: object) -> None:
        if self.fault:
            self.patch.stop()


TestArchiveProtocol = ArchiveProtocol.TestCase
TestArchiveProtocol.settings = settings(max_examples=examples(4, 10, 200), stateful_step_count=20)
