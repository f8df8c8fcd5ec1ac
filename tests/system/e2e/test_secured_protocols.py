"""A broker process whose HTTP and SQS listeners have TLS: it answers from the beginning of its start on, its users log
in, and the health check of the image finds it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import httpx
import pytest
from tools.image import FLAVOURS

from support.certificates import Authority
from support.forked_serve import run_command
from support.machine import scaled
from support.paths import free_port
from support.process import inherited, served
from support.sqs import sqs_client
from support.tls_listener import client_context
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S: Final = 30


@pytest.mark.full
def test_a_process_serves_http_and_sqs_over_tls_to_users(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    issued = authority.issue()
    keys, password = tmp_path / "keys", tmp_path / "password"
    keys.write_text("AKID secret\n")
    password.write_text("correct horse\n")
    sqs_port = free_port()
    settings = {
        "ssl_certificate_location": issued.certificate,
        "ssl_key_location": issued.key,
        "open_listeners": "PLAINTEXT",
        "http_security_protocol": "SASL_SSL",
        "sqs_listener": f"127.0.0.1:{sqs_port}",
        "sqs_security_protocol": "SSL",
        "sqs_access_keys_file": keys,
    }
    arguments = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    context = client_context(authority.certificate)
    with served(tmp_path / "data", arguments=arguments) as broker:
        create = ["user", "create", "alice", "--password-file", str(password)]
        created = run_command([*create, "-b", broker.bootstrap_servers], inherited())
        assert created.returncode == 0, created
        url = f"https://127.0.0.1:{broker.http_port}"
        with httpx.Client(base_url=url, verify=context, timeout=scaled(TIMEOUT_S)) as client:
            assert client.get("/health/ready").json() == {"ready": True}
            assert client.get("/metrics").status_code == 401
            metrics = client.get("/metrics", auth=("alice", "correct horse"))
            assert "mansio_authentications_total 1.0" in metrics.text
        sqs = sqs_client(
            f"https://127.0.0.1:{sqs_port}",
            key_id="AKID",
            secret="secret",
            authority=str(authority.certificate),
        )
        assert "QueueUrls" not in sqs.list_queues()
        before = broker.text().count("tls_certificate_renewed")
        broker.signal(signal.SIGHUP)
        wait_until(
            lambda: broker.text().count("tls_certificate_renewed") > before,
            scaled(TIMEOUT_S),
            "the renewal of the certificate",
        )
        check = FLAVOURS["broker"].settings["Healthcheck"]["Test"][3]
        check = check.replace(":9080", f":{broker.http_port}")
        environment = {**os.environ, "MANSIO_HTTP_SECURITY_PROTOCOL": "SASL_SSL"}
        subprocess.run([sys.executable, "-c", check], env=environment, check=True, timeout=scaled(TIMEOUT_S))
        assert broker.stop() == 0
