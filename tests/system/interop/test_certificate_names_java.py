"""Java prints random subjects of certificates as we do: principals in ACLs are those of Kafka."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING

import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from mansio.spark.session.java import find_java
from mansio.state.authentication.certificate_names import print_subject
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
