"""Java prints and matches random subjects of certificates as we do: principals in ACLs are those of Kafka."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING

import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from mansio.spark.session.java import find_java
from mansio.state.authentication.certificate_names import print_subject
from mansio.state.authentication.group_pattern import GroupPattern
from support.certificate_subjects import random_subject
from support.tiers import repetitions

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.full


@pytest.fixture
def java() -> Iterator[JavaGateway]:
    program = os.path.join(find_java().home, "bin", "java")
    port, token, process = launch_gateway(
        java_path=program, die_on_exit=True, enable_auth=True, return_proc=True
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port, auth_token=token))
    yield gateway
    gateway.shutdown()
    process.stdin.close()  # it ends with its standard input
    process.wait(60)


def test_random_subjects_are_printed_as_by_java(java: JavaGateway) -> None:
    random = Random(11)
    principal = java.jvm.javax.security.auth.x500.X500Principal
    for _ in range(repetitions(1_000, 20_000)):
        subject = random_subject(random)
        assert print_subject(subject) == principal(subject).getName(), subject.hex()


ATOMS = ("a", "b", "=", ".", "[ab]", "[^a,]", r"\w", r"\W", r"\d", r"\,", r"\s")
REPEATERS = ("", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,}?")


def random_expression(random: Random, depth: int = 0) -> str:
    """An expression with groups. What is repeated is not empty: engines end such a repetition at different places."""
    parts = []
    for _ in range(random.randrange(1, 4)):
        inside = random_expression(random, depth + 1) if depth < 2 else "a"
        part = random.choice((random.choice(ATOMS), f"({inside})", f"({inside}|b)", f"(?:a{inside})"))
        parts.append(part + (random.choice(REPEATERS) if part[:1] != "(" or part[:3] == "(?:" else ""))
    return "".join(parts)


def test_random_expressions_have_the_groups_that_java_finds(java: JavaGateway) -> None:
    random = Random(12)
    for _ in range(repetitions(500, 10_000)):
        expression = random_expression(random)
        ours, pattern = GroupPattern(expression), java.jvm.java.util.regex.Pattern.compile(expression)
        for _ in range(4):
            text = "".join(random.choice("ab=,1é ") for _ in range(random.randrange(8)))
            matcher = pattern.matcher(text)
            found = None
            if matcher.matches():
                found = tuple(matcher.group(n) or "" for n in range(matcher.groupCount() + 1))
            assert ours.match(text) == found, (expression, text)
