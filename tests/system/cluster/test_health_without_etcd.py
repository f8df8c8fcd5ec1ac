"""While etcd is away, `mansio cluster status` and `mansio doctor` report the sessions that are not held, and fail."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from mansio.cli.main import main
from support.cluster import cluster
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_S = 60.0
TIME = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_sessions_that_are_not_held_are_reported_with_their_time_and_fail_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster(tmp_path, brokers=2, broker_session_timeout_ms=3000) as one:

        def call(*arguments: str) -> tuple[object, str, str]:
            with pytest.raises(SystemExit) as ended:
                main([*arguments, "--bootstrap-servers", one.bootstrap_servers])
            printed = capsys.readouterr()
            return ended.value.code, printed.out, printed.err

        def checks() -> list[dict[str, Any]]:
            code, printed, _ = call("doctor", "--output", "json")
            found = json.loads(printed)
            failed = any(check["status"] == "problem" for check in found)
            assert code == (1 if failed else 0)
            return [check for check in found if check["detail"].startswith("session_not_held")]

        assert call("cluster", "status", "--output", "json")[0] == 0
        assert checks() == []
        (etcd,) = one.members
        etcd.kill()
        wait_until(
            lambda: json.loads(call("cluster", "status", "--output", "json")[1])["no_session"] == 2,
            DEADLINE_S,
            "no session is held",
        )
        code, printed, errors = call("cluster", "status")
        assert code == 1
        assert "no session" in printed.lower().replace("_", " ")
        pattern = rf"mansio: broker [12] does not hold its session since {TIME}: etcd has not renewed .*"
        lines = errors.splitlines()
        assert len(lines) == 2
        assert all(re.fullmatch(pattern, line) for line in lines), errors
        _, rows, _ = call("cluster", "brokers", "--output", "json")
        assert [row["state"] for row in json.loads(rows)] == ["no session"] * 2
        found = checks()
        assert [(check["name"], check["status"]) for check in found] == [
            ("broker 1", "problem"),
            ("broker 2", "problem"),
        ]
        assert all(re.match(rf"session_not_held, since {TIME}: ", check["detail"]) for check in found)

        etcd.start()
        wait_until(lambda: call("cluster", "status")[0] == 0, DEADLINE_S, "the sessions are held again")
        wait_until(lambda: checks() == [], DEADLINE_S, "doctor reports no session")
