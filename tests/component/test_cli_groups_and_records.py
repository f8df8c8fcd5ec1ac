"""Commands that change offsets of groups and delete records: an error of one partition is reported, and the others are
changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import mansio
from support.machine import scaled
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mansio.Broker(
        tmp_path_factory.mktemp("data"), auto_create_topics_enable=False, group_initial_rebalance_delay_ms=0
    ) as broker:
        yield broker.address


@pytest.fixture
def shell(address: str) -> Shell:
    return Shell(address)


def starts(shell: Shell, topic: str) -> list[int]:
    return [row["start"] for row in shell.json("topic", "describe", topic)["partitions"]]


# Records


@pytest.mark.row("A6", "L6")
def test_the_oldest_records_of_a_topic_are_deleted(shell: Shell) -> None:
    shell("topic", "create", "pruned", "--partitions", "2")
    shell("produce", "pruned", "-p", "0", stdin=b"a\nb\nc\n")
    shell("produce", "pruned", "-p", "1", stdin=b"d\n")
    rows = [
        {
            "topic": "pruned",
            "partition": index,
            "old_start": 0,
            "new_start": end,
            "offsets": end,
            "error": None,
        }
        for index, end in ((0, 3), (1, 1))
    ]
    assert shell.json("topic", "delete-records", "pruned", "--before", "end", "--dry-run") == rows
    assert starts(shell, "pruned") == [0, 0]
    assert "NEW START" in shell("topic", "delete-records", "pruned", "-p", "0", "--before", "2")
    assert starts(shell, "pruned") == [2, 0]
    shell("topic", "delete-records", "pruned", "--before", "-1h")
    assert starts(shell, "pruned") == [2, 0], "nothing is that old"
    shell("topic", "delete-records", "pruned", "--before", "end")
    assert starts(shell, "pruned") == [3, 1]


@pytest.mark.row("A6", "L6")
def test_a_partition_that_refuses_has_a_row_and_does_not_keep_the_others(shell: Shell) -> None:
    shell("topic", "create", "uneven", "--partitions", "4")
    for index, count in ((0, 3), (2, 5), (3, 4)):
        shell("produce", "uneven", "-p", str(index), stdin=b"x\n" * count)
    shell("topic", "delete-records", "uneven", "-p", "3", "--before", "end")
    which = [text for index in (3, 2, 1, 0, 9) for text in ("-p", str(index))]

    def reported(*more: str) -> tuple[list[Any], dict[int, str]]:
        rows = shell.json("topic", "delete-records", "uneven", *which, "--before", "2", *more, code=1)
        assert shell.errors == "mansio: 2 of 5 partitions failed: see ERROR\n"
        values = [(row["partition"], row["old_start"], row["new_start"], row["offsets"]) for row in rows]
        return values, {row["partition"]: row["error"] for row in rows if row["error"] is not None}

    planned, refused = reported("--dry-run")
    assert starts(shell, "uneven") == [0, 0, 0, 4], "a dry run deletes nothing"
    done, failed = reported()
    assert starts(shell, "uneven") == [2, 0, 2, 4]
    expected = [(0, 0, 2, 2), (1, 0, None, None), (2, 0, 2, 2), (3, 4, 4, 0), (9, None, None, None)]
    assert done == planned == expected
    assert refused.keys() == failed.keys() == {1, 9}
    assert "uneven-1" in refused[1]
    assert "uneven-1: offset 2 is beyond its end" in failed[1]
    assert refused[9] == failed[9] == "topic uneven has no partition 9"
    table = shell("topic", "delete-records", "uneven", "--before", "5", code=1).splitlines()
    assert table[0].split()[-1] == "ERROR"
    assert len(table) == 5


@pytest.mark.row("A6", "L6", "L7")
def test_a_topic_whose_records_are_not_deleted_is_refused_by_the_dry_run_too(shell: Shell) -> None:
    shell("topic", "create", "compacted", "--config", "cleanup.policy=compact")
    shell("produce", "compacted", "-k", "key", stdin=b"x\n")
    for topic, word in (("compacted", "compaction"), ("nowhere", "no such topic")):
        for more in ((), ("--dry-run",)):
            assert shell("topic", "delete-records", topic, "--before", "end", *more, code=1) == ""
            assert word in shell.errors
            assert shell.errors.count("\n") == 1


def test_milliseconds_without_an_at_sign_get_a_hint(shell: Shell) -> None:
    shell("topic", "create", "hinted")
    shell("topic", "delete-records", "hinted", "--before", "1384992000000", code=1)
    assert "are written @1384992000000" in shell.errors
    shell("group", "reset-offsets", "hinted", "--create", "-t", "hinted", "--to", "1384992000000", "-n")
    assert "are written @1384992000000" in shell.errors


def test_deleting_several_goes_on_after_one_that_is_not_there(shell: Shell) -> None:
    shell("topic", "create", "last")
    shell("topic", "delete", "first", "last", "never", code=1)
    assert [line.split("'")[1] for line in shell.errors.splitlines()] == ["first", "never"]
    assert "last" not in {row["name"] for row in shell.json("topic", "list")}
    shell("topic", "create", "read")
    shell("group", "reset-offsets", "there", "--create", "--topic", "read", "--to", "latest")
    shell("group", "delete", "first", "there", "never", code=1)
    assert [line.split()[2] for line in shell.errors.splitlines()] == ["first:", "never:"]
    assert "there" not in {row["group"] for row in shell.json("group", "list")}


# Groups


@pytest.mark.row("A6", "G2")
def test_a_group_whose_partitions_the_broker_assigns_is_shown_with_its_settings(shell: Shell) -> None:
    shell("topic", "create", "tuned", "--partitions", "2")
    settings = {"consumer.session.timeout.ms": "7000", "consumer.heartbeat.interval.ms": "200"}
    shell("group", "alter", "tuned", *(f"{name}={value}" for name, value in settings.items()))
    with shell.start("consume", "tuned", "--group", "tuned"):
        wait_until(
            lambda: (
                "tuned" in {row["group"] for row in shell.json("group", "list")}
                and any(
                    member["partitions"] for member in shell.json("group", "describe", "tuned")["members"]
                )
            ),
            20,
        )
        found = shell.json("group", "describe", "tuned")
        (member,) = found["members"]
        assert (found["type"], found["state"], found["protocol"]) == ("consumer", "Stable", "uniform")
        assert found["epoch"] == found["target_epoch"] == member["epoch"]
        assert member["partitions"] == member["target"] == ["tuned-0", "tuned-1"]
        assert (member["protocol"], member["topics"], member["pattern"]) == ("consumer", ["tuned"], None)
        assert {name: found["configs"][name] for name in settings} == {
            name: {"value": value, "source": "group"} for name, value in settings.items()
        }
        table = shell("group", "describe", "tuned")
        assert "setting  consumer.session.timeout.ms=7000\n" in table
        assert f"{member['member']}  " in table
        assert "tuned-0,tuned-1" in table
        (listed,) = (row for row in shell.json("group", "list") if row["group"] == "tuned")
        assert (listed["type"], listed["state"]) == ("consumer", "Stable")
        assert "TYPE" in shell("group", "list")
    shell("group", "alter", "tuned", "--unset", "consumer.session.timeout.ms")
    shown = shell.json("group", "describe", "tuned")["configs"]["consumer.session.timeout.ms"]
    assert shown["source"] != "group"
    assert "consumer.session.timeout.ms" not in shell("group", "describe", "tuned")


@pytest.mark.row("A6", "G2")
def test_a_setting_that_no_group_has_and_a_value_that_makes_no_sense_are_refused_in_one_line(
    shell: Shell,
) -> None:
    good = "consumer.heartbeat.interval.ms=200"
    for wrong, word in (
        ("nothing=1", "no such group setting"),
        ("consumer.session.timeout.ms=soon", "not a whole number"),
        ("consumer.session.timeout.ms=1", "below the minimum"),
        ("streams.session.timeout.ms=1", "not supported"),
    ):
        shell("group", "alter", "refused", good, wrong, code=1)
        assert word in shell.errors
        assert shell.errors.count("\n") == 1
    shell("group", "alter", "refused", "nothing", code=2)
    shell("group", "alter", "refused", code=2)
    shell("topic", "create", "refusing")
    shell("group", "reset-offsets", "refused", "--create", "--topic", "refusing", "--to", "earliest")
    assert "setting" not in shell("group", "describe", "refused"), "all of them or none"


@pytest.mark.row("A6", "G4")
def test_a_mistyped_group_is_an_error_and_comes_into_being_by_no_command(shell: Shell) -> None:
    shell("topic", "create", "typed")
    reset = ("group", "reset-offsets", "croo", "--to", "earliest")
    for arguments in (("group", "describe", "croo"), reset, (*reset, "--topic", "typed"), (*reset, "-n")):
        assert shell(*arguments, code=1) == ""
        assert shell.errors.startswith("mansio: there is no group croo")
    shell("group", "delete", "croo", code=1)
    assert "croo" in shell.errors
    shell(*reset, "--create", "--topic", "typed", "--partition", "7", code=1)
    assert shell.errors == "mansio: topic typed has no partition 7\n"
    assert "croo" not in {row["group"] for row in shell.json("group", "list")}
    shell(*reset, "--create", "--topic", "typed")
    assert "croo" in {row["group"] for row in shell.json("group", "list")}


@pytest.mark.row("A6", "G4")
def test_rows_of_a_group_are_sorted_and_only_what_it_has_a_place_in_moves(shell: Shell) -> None:
    for topic, count in (("zebra", "11"), ("ant", "2")):
        shell("topic", "create", topic, "--partitions", count)
        shell("produce", topic, "-p", "1", stdin=b"x\n")
    sorted_rows = [*(("ant", index) for index in range(2)), *(("zebra", index) for index in range(11))]
    reset = ("group", "reset-offsets", "herd", "--to")
    moved = shell.json(*reset, "latest", "--create", "-t", "zebra", "-t", "ant")
    assert [(row["topic"], row["partition"]) for row in moved] == sorted_rows
    assert {row["old"] for row in moved} == {None}
    described = shell.json("group", "describe", "herd")["offsets"]
    assert [(row["topic"], row["partition"]) for row in described] == sorted_rows
    (row,) = shell.json(*reset, "-1", "-t", "ant", "-p", "1")
    assert (row["old"], row["new"]) == (1, 0)
    shell("topic", "create", "unread")
    shell(*reset, "-1", "-t", "unread", code=1)
    assert "no committed offset" in shell.errors


@pytest.mark.row("A6", "G4")
def test_a_group_with_members_is_moved_by_neither_a_dry_run_nor_the_real_one(shell: Shell) -> None:
    shell("topic", "create", "busy")
    shell("produce", "busy", stdin=b"one\n")
    with shell.start("consume", "busy", "--group", "team", "--from-beginning") as member:
        assert member.stdout is not None
        assert member.stdout.readline() == b"one\n"
        for more in ((), ("--dry-run",)):
            shell("group", "reset-offsets", "team", "--to", "earliest", "-t", "busy", *more, code=1)
            assert shell.errors == "mansio: group team still has members; stop them first\n"


# A topic that goes away


@pytest.mark.full
@pytest.mark.row("A6", "G1", "L1")
def test_readers_of_a_topic_that_is_deleted_get_an_error_and_do_not_wait_for_ever(shell: Shell) -> None:
    shell("topic", "create", "doomed")
    shell("produce", "doomed", stdin=b"one\n")
    with (
        shell.start("consume", "doomed", "--from-beginning") as alone,
        shell.start("consume", "doomed", "--group", "mourners", "--from-beginning") as member,
    ):
        for reader in (alone, member):
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"one\n"
        shell("topic", "delete", "doomed")
        for reader in (alone, member):
            out, errors = reader.communicate(timeout=scaled(20))
            reported = (reader.returncode, out, errors)
            assert reported == (1, b"", b"mansio: topic doomed was deleted while it was being read\n")


@pytest.mark.row("A6")
@pytest.mark.parametrize("more", [(), ("--group", "g"), ("-p", "0"), ("--from-offset", "3"), ("-e",)])
def test_a_topic_that_does_not_exist_is_reported_at_once(shell: Shell, more: tuple[str, ...]) -> None:
    shell("consume", "nowhere", *more, code=1)
    assert shell.errors == "mansio: topic nowhere: there is no such topic; create it or correct the name\n"
