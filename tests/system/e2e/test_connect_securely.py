"""The examples of "Connect with TLS and a password" are run as they stand, each client against `mansio serve --secure`.

Those that need Java, Go or Spark's connector are in `tests/nightly`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from support.documents import examples
from support.paths import required_tool
from system.e2e.test_examples import started
from system.e2e.test_protected_start import SecurityBench

if TYPE_CHECKING:
    from pathlib import Path

PAGE: Final = "docs/how-to/connect-securely.md"
FIRST: Final = (
    *("user", "connect", "environment", "context"),
    *("confluent-kafka", "kafka-python", "aiokafka", "kcat", "celery", "access-keys"),
    *("api-key", "connect-api-key", "issuer"),
)
OTHER_PROTOCOLS: Final = ("curl", "boto3", "grpcio", "curl-api-key")
TOKENS: Final = ("token", "confluent-kafka-token", "curl-token")
CERTIFICATES: Final = ("certificate", "confluent-kafka-certificate", "doctor")
NIGHTLY: Final = (
    *("java-settings", "Greet.java", "java", "kafka-configs", "java-certificate"),
    *("franz-go/main.go", "sarama/main.go", "kafka-go/main.go", "go-certificate", "greetings.py"),
)

pytestmark = pytest.mark.full


def test_each_example_is_run() -> None:
    commands = ("serve", "serve-protocols", "serve-certificates", "serve-tokens")
    assert set(examples(PAGE)) == {*commands, *FIRST, *OTHER_PROTOCOLS, *CERTIFICATES, *TOKENS, *NIGHTLY}


def test_examples_of_the_page_work_in_their_order(tmp_path: Path) -> None:
    for tool in ("kcat", "curl", "openssl"):
        required_tool(tool)
    found = examples(PAGE)
    with started(tmp_path, PAGE, SecurityBench) as bench:
        printed = bench.follow({name: found[name] for name in FIRST})
    assert printed["environment"] == ["1"]
    assert any("SASL_SSL" in line for line in printed["context"])
    assert "greetings" in "".join(printed["context"])

    with started(tmp_path, PAGE, SecurityBench, "serve-protocols") as bench:
        printed = bench.follow({name: found[name] for name in OTHER_PROTOCOLS})
    assert '"name":"greetings"' in "".join(printed["curl"])
    assert '"name":"greetings"' in "".join(printed["curl-api-key"])

    with started(tmp_path, PAGE, SecurityBench, "serve-tokens") as bench:
        printed = bench.follow({name: found[name] for name in TOKENS})
    assert '"name":"greetings"' in "".join(printed["curl-token"])

    with started(tmp_path, PAGE, SecurityBench, "serve-certificates") as bench:
        printed = bench.follow({name: found[name] for name in CERTIFICATES})
    assert "authority is unknown" in "".join(printed["doctor"])
    text = "".join(log.read_text() for log in tmp_path.glob("serve*.log"))
    assert "Traceback" not in text
