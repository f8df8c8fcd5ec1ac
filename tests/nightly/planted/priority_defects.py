"""Defects of one line in the priorities of share groups. See `defects.py`."""

from __future__ import annotations

from nightly.planted.planted import Defect

MODEL = ("tests/unit/state/test_share_partition_model.py",)
SHARES = ("tests/unit/broker/features/priorities/test_priority_shares_properties.py",)
VIEW = ("tests/unit/broker/features/priorities/test_priority_view.py",)
UNIT = ("tests/unit/state/test_share_partition_priorities.py",)
COMPONENT = "tests/component/test_priorities.py"

PRIORITY_DEFECTS = (
    Defect(
        "urgent record moves the start past records of its own priority",
        "state/share_partition/machine.py",
        "return [part for each in free for part in difference([each], [*own.within(*each)])]",
        "return free",
        MODEL,
    ),
    Defect(
        "records of other priorities keep the start back",
        "state/share_partition/machine.py",
        "return self._pass(self._free_others(own, before), token, member)",
        "return []",
        MODEL,
    ),
    Defect(
        "records of other priorities are leased",
        "state/share_partition/machine.py",
        "return (part for each in ranges for part in own.within(*each))",
        "return iter(ranges)",
        MODEL,
    ),
    Defect(
        "lease bound does not reach the next record of the priority",
        "state/share_partition/machine.py",
        "bound = max(self.offset, own.bound_after(ranges.end, step), self._wanted_end)",
        "bound = max(self.offset, ranges.end + 1)",
        UNIT,
    ),
    Defect(
        "records of other priorities are withheld",
        "state/share_partition/snapshot.py",
        "wanted = [(ranges.start, stop - 1)] if own is None else [*own.within(ranges.start, stop - 1)]",
        "wanted = [(ranges.start, stop - 1)]",
        MODEL,
    ),
    Defect(
        "lower priorities are starved",
        "broker/features/priorities/priority_shares.py",
        "owed = (self._due[priority] + records_max) // SHARE_RECORDS",
        "owed = 0",
        SHARES,
    ),
    Defect(
        "lower priorities get one of seventeen deliveries",
        "broker/features/priorities/priority_shares.py",
        "due += total - own - (SHARE_RECORDS - 1) * own",
        "due += total - own - (SHARE_RECORDS + 1) * own",
        SHARES,
    ),
    Defect(
        "record locks are not reserved",
        "broker/features/priorities/priority_shares.py",
        "return locks_max - sum(leased.values()) - kept",
        "return locks_max - sum(leased.values())",
        SHARES,
    ),
    Defect(
        "priorities of a batch are those of its repeats",
        "broker/features/deduplication/deduplicator.py",
        "draft.found = _read_again(",
        "draft.found = draft.found or _read_again(",
        VIEW,
    ),
    Defect(
        "index is kept beyond a truncation",
        "broker/features/priorities/priority_view.py",
        "self.index.truncate(end_offset)",
        "pass",
        VIEW,
    ),
    Defect(
        "records before the setting get the priority of their headers after a restart",
        "broker/features/priorities/priority_view.py",
        "return self.index.end, self._is_new",
        "return self.index.end, False",
        VIEW,
    ),
    Defect(
        "a frozen index changes with the log",
        "state/share_partition/offset_numbers.py",
        "copy._chunks[last] = bytearray(copy._chunks[last])",
        "pass",
        ("tests/unit/state/test_offset_numbers_model.py",),
    ),
    Defect(
        "a part without records of the priority is known too long",
        "state/share_partition/offset_numbers.py",
        "self._note_none(first, min(last + 1, self._index.end))",
        "self._note_none(first, last + 1)",
        ("tests/unit/state/test_offset_numbers_model.py", *MODEL),
    ),
    Defect(
        "a priority begins at the end of the log",
        "broker/coordinator/share/partition_leader.py",
        "start = self._initial_offset(base)",
        "start = partition.high_watermark",
        (COMPONENT,),
    ),
    Defect(
        "offsets of one priority are reset only",
        "broker/services/share_groups/share_offsets.py",
        "if summary is not None or one.number == BASE:",
        "if one.number == BASE:",
        (COMPONENT,),
    ),
    Defect(
        "acknowledgements of several priorities are applied in part",
        "broker/coordinator/share/share_partitions.py",
        "self._by_number[number].check_acknowledgements(member, part)",
        "pass",
        (COMPONENT,),
    ),
    Defect(
        "a damaged batch of one priority takes the deliveries of the others",
        "broker/coordinator/share/share_partitions.py",
        "is_unused = True",
        "break",
        (COMPONENT,),
    ),
    Defect(
        "leases of one priority that were acquired in two steps are answered in part",
        "broker/services/share_groups/share.py",
        "change.acquired += (acquired,)",
        "change.acquired = (acquired,)",
        (COMPONENT,),
    ),
    Defect(
        "a group goes on without priorities after they were turned on",
        "broker/coordinator/share/share_partition_manager.py",
        "and self._index_of(partition) is found.topic_index",
        "and True",
        (COMPONENT,),
    ),
    Defect(
        "states of share partitions beside the first one are not deleted",
        "broker/coordinator/share/share_partition_manager.py",
        "return [key._replace(number=number) for number in (*self._indexes.numbers_of(key.topic_id), *queues)]",
        "return [key]",
        ("tests/component/test_share_index.py",),
    ),
    Defect(
        "an acknowledgement goes to the first share partition",
        "state/share_partition/share_index.py",
        "found.setdefault(number, []).append(batch._replace(first=low, last=high, types=own))",
        "found.setdefault(BASE, []).append(batch._replace(first=low, last=high, types=own))",
        ("tests/component/test_share_index.py",),
    ),
    Defect(
        "keys of records of other priorities are read",
        "state/share_partition/machine.py",
        "following = self._own.first_at_or_above(key_index.scanned_end)",
        "following = key_index.scanned_end",
        UNIT,
    ),
    Defect(
        "the count of a chunk is kept over a truncation",
        "state/share_partition/offset_numbers.py",
        "self._counts.clear()",
        "pass",
        ("tests/unit/state/test_offset_numbers_model.py",),
    ),
    Defect(
        "acknowledgements of any number of offsets are split",
        "state/share_partition/share_index.py",
        "left -= count",
        "pass",
        SHARES,
    ),
)
