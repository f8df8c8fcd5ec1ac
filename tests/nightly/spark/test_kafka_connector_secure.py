"""Spark's own Kafka connector over TLS, with each mechanism and with a certificate, against `mansio serve --secure`.

Its jars come from Maven. The program is that of the page "Connect with TLS and a password".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mansio.config.security import SASL_MECHANISMS
from nightly.spark.test_kafka_connector import FETCH_DEADLINE_S, RUN_DEADLINE_S, fetch, run_connector
from support.documents import Example, examples
from system.e2e.test_connect_securely import PAGE
from system.e2e.test_examples import started
from system.e2e.test_protected_start import SecurityBench

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(FETCH_DEADLINE_S + RUN_DEADLINE_S + 60)
def test_sparks_own_connector_reads_and_writes_over_tls(tmp_path: Path) -> None:
    fetch()
    found = examples(PAGE)
    with started(tmp_path, PAGE, SecurityBench, "serve-certificates") as bench:
        copies = "".join(
            f"mansio topic create copy-{number}\n"
            f"mansio acl add alice --role writer --topic copy-{number}\n"
            f"mansio acl add alice --role reader --topic copy-{number}\n"
            for number in range(4)
        )
        prepare = ("user", "certificate", "java-certificate", "greetings.py")
        for example in (*(found[name] for name in prepare), Example("copies", "sh", copies)):
            outcome = bench.run(example)
            assert outcome.code == 0, outcome.output
        read = run_connector("kafka_connector_secure.py", tmp_path)
    assert read == {way: [["from Spark"], 1, 1] for way in (*SASL_MECHANISMS, "certificate")}
    assert "Traceback" not in (tmp_path / "serve-certificates.log").read_text()
