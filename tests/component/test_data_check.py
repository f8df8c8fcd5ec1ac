"""`mansio data check`: each kind of damage is reported with file and offsets; sound directories stay unchanged."""

from __future__ import annotations

import json
import os
import random
import shutil
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.broker.coordinator.share import share_coordinator
from mansio.broker.maintenance.data_check import DataCheckReport, ProgressCallbacks, check_data_directory
from mansio.broker.maintenance.data_dir_mode import MovedTo, write_moved_to
from mansio.cli.broker.data_check import damage_map
from mansio.cli.main import main
from mansio.errors import DataDirectoryLocked, StorageError
from mansio.host.disk import HostDisk
from mansio.storage.inspection import BadRange, Finding, LogReport, Severity
from mansio.storage.segment import walk
from mansio.wire.batch.record_batch import HEADER_BYTES
from support.present import present
from support.tiers import examples
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RECORDS = 120
DAMAGE, REBUILD, NOTE = Severity


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with a topic of five segments, committed offsets and snapshots of producers."""
    data = tmp_path_factory.mktemp("check") / "data"
    with (
        mansio.Broker(data, offsets_topic_num_partitions=1) as broker,
        mansio.blocking.connect(broker.address) as client,
    ):
        client.admin.create_topic("t", config={"segment.bytes": "12000"})
        for number in range(RECORDS):
            client.publish("t", random.Random(number).randbytes(300))
        client.admin.reset_offsets("g", ["t"], to="latest")
    return data


@pytest.fixture
def data(healthy: Path, tmp_path: Path) -> Path:
    return shutil.copytree(healthy, tmp_path / "data")


def log_of(data: Path) -> Path:
    (topic,) = data.glob("topics/t.*")
    return topic / "0"


def segments_of(data: Path) -> list[Path]:
    return sorted(log_of(data).glob("*.log"))


def diagnose(data: Path, *, repair: bool = False) -> DataCheckReport:
    return check_data_directory(HostDisk(), str(data), repair=repair)


def worst(diagnosis: DataCheckReport) -> list[Finding]:
    return [finding for finding in diagnosis.all_findings() if finding.severity is not NOTE]


def flip(path: Path, position: int, mask: int = 0x10) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes((byte ^ mask,)))


def batches(segment: Path) -> list[tuple[int, int]]:
    """(position, base offset) of the batches of a sound segment."""
    file = HostDisk().open_readonly(str(segment))
    return [(at, header.base_offset) for at, header in walk(file, 0, file.size(), int(segment.stem))]


def everything(root: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(root)): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
    }


def test_healthy_directory_is_clean_and_all_of_it_was_read(data: Path) -> None:
    assert len(segments_of(data)) >= 4
    total: list[int] = []
    read: list[int] = []
    diagnosis = check_data_directory(
        HostDisk(), str(data), progress=ProgressCallbacks(total.append, read.append)
    )
    assert diagnosis.is_clean
    assert list(diagnosis.all_findings()) == []
    (report,) = [one.log for one in diagnosis.partitions if one.topic == "t"]
    assert (report.start_offset, report.end_offset, report.batch_count) == (0, RECORDS, RECORDS)
    assert sum(read) >= total[0] == sum(one.log.size_bytes for one in diagnosis.partitions)


def test_nothing_is_changed_without_repair_whatever_is_found(data: Path) -> None:
    flip(segments_of(data)[1], 100)
    flip(next(log_of(data).glob("*.index")), 60)
    (log_of(data) / "left.tmp").write_bytes(b"x")
    before = everything(data)
    assert not diagnose(data).is_clean
    assert everything(data) == before


def test_directory_of_a_killed_broker_is_read_without_a_trace(tmp_path: Path, healthy: Path) -> None:
    """The last changes of the metadata are in its write-ahead log then."""
    with mansio.Broker(tmp_path / "live") as broker, mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("t", partitions=2)
        client.publish("t", b"value", partition=1)
        data = shutil.copytree(tmp_path / "live", tmp_path / "data")
    assert (data / "metadata.sqlite3-wal").stat().st_size
    before = everything(data)
    diagnosis = diagnose(data)
    assert worst(diagnosis) == []
    assert {(one.topic, one.partition) for one in diagnosis.partitions} == {("t", 0), ("t", 1)}
    assert everything(data) == before


def test_running_broker_is_not_examined(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path / "data"), pytest.raises(DataDirectoryLocked):
        diagnose(tmp_path / "data")


def test_a_directory_whose_metadata_was_moved_to_etcd_is_that_of_a_cluster(data: Path) -> None:
    """Topics of the cluster are in no SQLite file; other processes have directories below this one."""
    write_moved_to(HostDisk(), str(data), MovedTo("c1", 1))
    for name in ("processes.json", "supervisor.lock"):
        (data / name).write_text("{}")
    (data / "1").mkdir()
    shutil.copytree(log_of(data).parent, data / "topics" / "later.x")
    diagnosis = diagnose(data)
    assert {(one.topic, one.partition) for one in diagnosis.partitions} >= {("t", 0), ("later", 0)}
    notes = {finding.path: finding.what for finding in diagnosis.findings}
    assert notes.keys() == {f"{data}/moved.json", f"{data}/1"}
    assert "moved to etcd" in notes[f"{data}/moved.json"]
    assert all(finding.severity is NOTE for finding in diagnosis.findings)
    (data / "topics").rename(data / "1" / "topics")
    (data / "metadata.sqlite3").unlink()
    with pytest.raises(StorageError, match=f"several broker processes: check theirs, {data}/0"):
        diagnose(data)


def test_a_broker_of_a_cluster_that_never_had_a_replica_is_checked(tmp_path: Path) -> None:
    (tmp_path / "broker.json").write_text('{"cluster_id": "c1", "node_id": 2}')
    assert worst(diagnose(tmp_path)) == []


def test_something_else_is_no_data_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="not a data directory"):
        diagnose(tmp_path)
    assert list(tmp_path.iterdir()) == []


# Segments


@pytest.mark.parametrize("number", [0, 1, -1])
def test_flipped_bit_in_a_record_costs_its_batch_and_no_other(data: Path, number: int) -> None:
    segment = segments_of(data)[number]
    position, offset = batches(segment)[3]
    flip(segment, position + HEADER_BYTES + 50)
    (found,) = worst(diagnose(data))
    assert (found.severity, found.path) == (DAMAGE, str(segment))
    assert (found.first_offset, found.end_offset, found.position) == (offset, offset + 1, position)
    assert "CRC" in found.what
    assert f"record {offset} cannot be read, all other records can" in found.meaning


def test_flipped_bit_in_any_byte_of_a_batch_header_is_found_where_it_is(data: Path) -> None:
    segment = segments_of(data)[1]
    position, offset = batches(segment)[3]
    for byte in range(HEADER_BYTES):
        flip(segment, position + byte)
        diagnosis = diagnose(data)
        flip(segment, position + byte)
        found = worst(diagnosis)
        assert found, f"byte {byte} of the header"
        assert [(one.severity, one.path) for one in found] == [(DAMAGE, str(segment))] * len(found), byte
        assert {(one.first_offset, one.end_offset) for one in found} == {(offset, offset + 1)}, byte
        (report,) = [one.log for one in diagnosis.partitions if one.topic == "t"]
        assert report.batch_count >= RECORDS - 1, byte
        assert report.end_offset == RECORDS, byte
    assert worst(diagnose(data)) == []


def test_zeroed_range_is_one_finding_with_all_its_offsets(data: Path) -> None:
    segment = segments_of(data)[2]
    known = batches(segment)
    with segment.open("r+b") as file:
        file.seek(known[4][0])
        file.write(bytes(known[9][0] - known[4][0]))
    (found,) = worst(diagnose(data))
    assert (found.first_offset, found.end_offset) == (known[4][1], known[9][1])


@pytest.mark.parametrize("at_boundary", [True, False])
def test_truncated_closed_segment_names_what_is_gone(data: Path, at_boundary: bool) -> None:
    segment, following = segments_of(data)[1:3]
    position, offset = batches(segment)[-3]
    os.truncate(segment, position + (0 if at_boundary else 70))
    damage = [finding for finding in worst(diagnose(data)) if finding.severity is DAMAGE]
    assert {finding.path for finding in damage} == {str(segment)}
    assert min(finding.first_offset for finding in damage) == offset
    assert max(finding.end_offset for finding in damage) == int(following.stem)


def test_truncated_newest_segment_below_the_checkpoint_is_damage_not_a_torn_tail(data: Path) -> None:
    segment = segments_of(data)[-1]
    position, offset = batches(segment)[-2]
    os.truncate(segment, position)
    damage = [finding for finding in worst(diagnose(data)) if finding.severity is DAMAGE]
    assert [(finding.first_offset, finding.end_offset) for finding in damage] == [(offset, RECORDS)]


def test_torn_tail_above_the_checkpoint_is_a_note(data: Path) -> None:
    segment = segments_of(data)[-1]
    with segment.open("ab") as file:
        file.write(b"torn by a crash" * 10)
    diagnosis = diagnose(data)
    assert [finding.severity for finding in diagnosis.all_findings()] == [NOTE]
    assert diagnosis.is_clean
    (report,) = [one.log for one in diagnosis.partitions if one.topic == "t"]
    assert [bad_range.torn for bad_range in report.bad_ranges] == [True]


def test_room_ahead_of_the_batches_is_nothing_to_tell(data: Path) -> None:
    """A broker that was killed leaves its newest segments longer than their batches."""
    newest = segments_of(data)[-1]
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size + 70_000)
    before = newest.read_bytes()
    diagnosis = diagnose(data)
    assert list(diagnosis.all_findings()) == []
    assert newest.read_bytes() == before


@pytest.mark.parametrize("number", [0, 2])
def test_deleted_segment_is_missed(data: Path, number: int) -> None:
    segments = segments_of(data)
    segments[number].unlink()
    damage = [finding for finding in worst(diagnose(data)) if finding.severity is DAMAGE]
    lost = (int(segments[number].stem), int(segments[number + 1].stem))
    assert [(finding.first_offset, finding.end_offset) for finding in damage] == [lost]


def test_deleted_newest_segment_is_missed(data: Path) -> None:
    segments_of(data)[-1].unlink()
    assert any(finding.end_offset == RECORDS for finding in worst(diagnose(data)))


def test_segment_of_another_partition_does_not_fit(data: Path) -> None:
    first, second = segments_of(data)[:2]
    shutil.copyfile(first, second)
    assert any(finding.path == str(second) for finding in worst(diagnose(data)))


@pytest.mark.parametrize("seed", range(examples(10, 25)))
def test_any_flip_in_any_file_is_named(data: Path, seed: int) -> None:
    """Wherever it hits, the file is named; nothing else is accused of damage."""
    chance = random.Random(seed)
    files = [path for path in sorted(log_of(data).iterdir()) if path.stat().st_size]
    path = chance.choice(files)
    size = path.stat().st_size
    position = chance.randrange(size)
    if path.name == "checkpoint":
        position = chance.choice((0, 4096)) + chance.randrange(56)
    flip(path, position, 1 << chance.randrange(8))
    found = worst(diagnose(data))
    assert {finding.path for finding in found} == {str(path)}


def test_offsets_that_compaction_took_are_not_missed_and_damage_in_what_is_left_is(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with (
        mansio.Broker(data, log_cleaner_backoff_ms=50, log_flush_offset_checkpoint_interval_ms=10) as broker,
        mansio.blocking.connect(broker.address) as client,
    ):
        config = {"cleanup.policy": "compact", "segment.bytes": "3000", "min.cleanable.dirty.ratio": "0.01"}
        client.admin.create_topic("t", config=config)
        for number in range(RECORDS):
            client.publish("t", b"x" * 100, key=str(number % 7).encode())
        log_cleaner = present(broker._broker).service.log_cleaner
        assert log_cleaner is not None
        wait_until(lambda: log_cleaner.counts.records_dropped > RECORDS // 2, 20, "the log is compacted")
    diagnosis = diagnose(data)
    assert [finding for finding in worst(diagnosis) if finding.severity is DAMAGE] == []
    (report,) = [one.log for one in diagnosis.partitions if one.topic == "t"]
    assert (report.end_offset, report.batch_count < RECORDS) == (RECORDS, True)
    segment = next(path for path in segments_of(data) if path.stat().st_size)
    flip(segment, batches(segment)[0][0] + HEADER_BYTES + 9)
    assert [finding.path for finding in worst(diagnose(data)) if finding.severity is DAMAGE] == [str(segment)]


def ruin(path: Path, chance: random.Random) -> None:
    """Do something terrible to a file."""
    size = path.stat().st_size
    start = chance.randrange(size)
    length = min(chance.choice((1, 8, 200, 5000)), size - start)
    match chance.randrange(4):
        case 0:
            os.truncate(path, start)
        case 1:
            path.unlink()
        case _ as kind:
            with path.open("r+b") as file:
                file.seek(start)
                file.write(chance.randbytes(length) if kind == 2 else bytes(length))


def ruin_and_examine(data: Path, seed: int) -> None:
    """Whatever happened, the check ends, reports what it found, and repairs without changing records."""
    chance = random.Random(seed)
    files = [path for path in sorted(data.rglob("*")) if path.is_file() and path.stat().st_size]
    for path in chance.sample(files, chance.randint(1, 4)):
        ruin(path, chance)
    before = everything(data)
    found = list(diagnose(data).all_findings())
    assert everything(data) == before
    diagnose(data, repair=True)
    segments = {name: content for name, (content, _) in before.items() if name.endswith(".log")}
    assert {name: (data / name).read_bytes() for name in segments} == segments
    left = [finding for finding in diagnose(data).all_findings() if finding.severity is REBUILD]
    assert len(left) <= len([finding for finding in found if finding.severity is REBUILD])


@pytest.mark.parametrize("seed", range(examples(8, 20)))
def test_several_ruined_files_never_stop_the_check_or_make_it_change_records(data: Path, seed: int) -> None:
    ruin_and_examine(data, seed)


# What only repeats the segments


def rot_index(data: Path) -> Path:
    path = sorted(log_of(data).glob("*.index"))[1]
    flip(path, 70)
    return path


def lose_index(data: Path) -> Path:
    path = sorted(log_of(data).glob("*.index"))[1]
    path.unlink()
    return path


def swap_indexes(data: Path) -> Path:
    from mansio.storage.index import load_index

    disk = HostDisk()
    path = sorted(log_of(data).glob("*.index"))[1]
    loaded = load_index(disk, str(path), int(path.stem))
    assert loaded is not None
    loaded.index._positions[-1] += 5
    path.write_bytes(loaded.index.encode(int(path.stem), loaded.end_offset, loaded.covered_bytes))
    return path


def rot_times(data: Path) -> Path:
    path = log_of(data) / "times"
    flip(path, 20)
    return path


def rot_epochs(data: Path) -> Path:
    path = log_of(data) / "epochs"
    flip(path, 18)
    return path


def lose_epochs(data: Path) -> Path:
    path = log_of(data) / "epochs"
    path.unlink()
    return path


def rot_slot(data: Path) -> Path:
    path = log_of(data) / "checkpoint"
    flip(path, 30)
    return path


def rot_producers(data: Path) -> Path:
    path = next(log_of(data).glob("*.producers"))
    flip(path, 9)
    return path


def rot_view(data: Path) -> Path:
    path = next((data / "views").glob("*.checkpoint"))
    flip(path, 12)
    return path


@pytest.mark.parametrize(
    "harm",
    [
        rot_index,
        lose_index,
        swap_indexes,
        rot_times,
        rot_epochs,
        lose_epochs,
        rot_slot,
        rot_producers,
        rot_view,
    ],
)
def test_derived_file_is_named_then_repaired_then_clean(data: Path, harm: Callable[[Path], Path]) -> None:
    path = harm(data)
    (found,) = worst(diagnose(data))
    assert (found.severity, found.path, found.repaired) == (REBUILD, str(path), "")
    records = {segment: segment.read_bytes() for segment in segments_of(data)}
    (repaired,) = worst(diagnose(data, repair=True))
    assert repaired.repaired
    assert {segment: segment.read_bytes() for segment in segments_of(data)} == records
    assert worst(diagnose(data)) == []
    with mansio.Broker(data) as broker:
        assert present(broker._broker).service.partitions.find("t", None, 0).end_offset == RECORDS


def test_repaired_index_leads_readers_around_the_damage(data: Path) -> None:
    segment = segments_of(data)[1]
    known = batches(segment)
    flip(segment, known[2][0] + 9)  # the length: nobody can walk over it
    segment.with_suffix(".index").unlink()
    diagnose(data, repair=True)
    after = known[3][1]
    disk = HostDisk()
    from mansio.storage.log import Log
    from support.logs import ManualClock

    log = Log.open(disk, ManualClock(), str(log_of(data)))
    part = log.read(after, 1, log.end_offset)
    assert part is not None
    assert part.position == known[3][0]
    log.close(save=False)


# Beside the logs


def test_damaged_metadata_is_reported_and_the_partitions_are_examined_all_the_same(data: Path) -> None:
    path = data / "metadata.sqlite3"
    content = bytearray(path.read_bytes())
    at = content.rindex(b'"partitions"') if b'"partitions"' in content else len(content) // 2
    content[at] ^= 4
    path.write_bytes(content)
    segment = segments_of(data)[1]
    flip(segment, 200)
    found = worst(diagnose(data))
    assert {(finding.severity, finding.path) for finding in found} == {
        (DAMAGE, str(path)),
        (DAMAGE, str(segment)),
    }


def test_missing_partition_and_strange_directories_are_reported(data: Path) -> None:
    gone = log_of(data)
    shutil.rmtree(gone)
    (data / "topics" / "stranger.AAAA").mkdir()
    (data / "notes.txt").write_text("mine")
    found = {(finding.severity, finding.path) for finding in diagnose(data).all_findings()}
    assert found == {
        (DAMAGE, str(gone)),
        (NOTE, str(data / "topics" / "stranger.AAAA")),
        (NOTE, str(data / "notes.txt")),
    }


def test_what_share_groups_keep_there_is_no_stranger(data: Path) -> None:
    (data / share_coordinator.BOOT_ID_FILE_NAME).write_text("a start of the machine")
    assert list(diagnose(data).all_findings()) == []


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["data", "check", *arguments])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def test_command_reports_in_lines_pictures_and_a_table(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, str(data))[0] == 0
    segment = segments_of(data)[1]
    position, offset = batches(segment)[3]
    flip(segment, position + HEADER_BYTES + 50)
    lose_index(data)
    code, out, _ = run(capsys, str(data))
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("DAMAGE")
    assert f"record {offset} cannot be read" in lines[0]
    assert lines[1].startswith("REBUILD")
    (strip,) = [line for line in lines if line.startswith("t-0")]
    assert 1 <= strip.count("X") <= 2
    assert lines[-1] == "Damage found: see above."
    code, out, _ = run(capsys, str(data), "--repair", "--output", "json")
    reported = json.loads(out)
    assert (code, reported["clean"]) == (1, False), "records stay damaged"
    assert [topic["damaged_records"] for topic in reported["topics"] if topic["topic"] == "t"] == [1]


def test_command_that_cannot_tell_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, str(tmp_path / "nothing"))
    assert (code, err.count("\n")) == (2, 1)
    with mansio.Broker(tmp_path / "data"):
        code, _, err = run(capsys, str(tmp_path / "data"))
    assert code == 2
    assert "a broker runs on" in err


def test_strip_shows_the_smallest_damage_and_never_more_cells_than_there_are() -> None:
    log = LogReport("d", size_bytes=10**12)
    log.bad_ranges = [BadRange(5, 6, False), BadRange(10**12 - 1, 10**12, True)]
    states = damage_map(log, 10)
    assert states == ["damaged", *["good"] * 8, "torn"]


@pytest.fixture(autouse=True)
def _no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
