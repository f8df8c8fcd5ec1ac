"""Printed commands of a protected start: a shell takes every path and address as it is, and no line has a password."""

from __future__ import annotations

import ast
import shlex

from mansio.cli.broker.connection_lines import connection_lines
from mansio.node.protected_start import ClientFiles

DIRECTORY = "/data of $USER's {best}"
FILES = ClientFiles(
    f"{DIRECTORY}/ca.pem", "admin", "SCRAM-SHA-512", f"{DIRECTORY}/admin.password", f"{DIRECTORY}/kcat.conf"
)


def test_paths_and_addresses_reach_the_commands_unchanged() -> None:
    lines = connection_lines(FILES, "[::1]:9092")
    command = lines["mansio"].split("\nmansio context use")[0]
    assert "'[::1]:9092'" in command
    assert shlex.split(command.replace("\\\n", "")) == [
        *("mansio", "context", "add", "secure", "--replace", "-b", "[::1]:9092", "--ca", FILES.ca),
        *(
            "--user",
            "admin",
            "--mechanism",
            "SCRAM-SHA-512",
            "--password-file",
            f"{DIRECTORY}/admin.password",
        ),
    ]
    assert shlex.split(lines["kcat"]) == ["kcat", "-F", f"{DIRECTORY}/kcat.conf", "-L"]
    program = lines["confluent-kafka"].split("<<'END'\n")[1].split("END\n")[0]
    constants = {node.value for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Constant)}
    assert {"[::1]:9092", FILES.ca, FILES.password, "SCRAM-SHA-512"} <= constants


def test_there_are_no_commands_without_the_file_of_the_password() -> None:
    files = ClientFiles(FILES.ca, "admin", "SCRAM-SHA-256", None, None)
    assert connection_lines(files, "127.0.0.1:9092") == {}
