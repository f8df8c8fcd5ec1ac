"""Certificates that a revocation list names are refused, also on connections that are open when the list changes."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from mansio.errors import ConfigError
from mansio.net.tls import contexts
from mansio.net.tls.contexts import load_dialler_context, load_server_context
from mansio.testing.broker import TestBroker
from support.certificates import Authority
from support.machine import scaled
from support.tls_broker import tls_broker
from support.tls_listener import TlsListener, client_context, echoes, is_refused, tls_files
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.net.tls.contexts import TlsFiles
    from support.certificates import Certificate

LONG_AGO = ("20200101000000Z", "20200201000000Z")
LATER = ("20900101000000Z", "20910101000000Z")
API_VERSIONS = bytes.fromhex("00000011001200000000000100076c696272646b61")


class Scene:
    """An authority with a list, the files of a listener that requires certificates, and two clients."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory / "authority")
        self.issued = self.authority.issue()
        self.alice = self.authority.issue("alice", names=())
        self.mallory = self.authority.issue("mallory", names=())
        self.list = directory / "crl.pem"
        self.revoke()
        self.files: TlsFiles = replace(tls_files(self.issued, self.authority, "required"), crl=str(self.list))

    def revoke(self, *revoked: Certificate) -> None:
        self.list.write_text(self.authority.revocation_list(*revoked))

    def context(self, client: Certificate) -> ssl.SSLContext:
        return client_context(self.authority.certificate, client)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_revoked_client_is_refused_and_others_are_served(scene: Scene) -> None:
    scene.revoke(scene.mallory)
    with TlsListener(load_server_context(scene.files).context) as listener:
        with listener.connect(scene.context(scene.alice)) as client:
            assert echoes(client)
        assert is_refused(listener, scene.context(scene.mallory))
        wait_until(lambda: listener.failures() == {"revoked": 1}, 20, "the failure")


@pytest.mark.full
def test_client_of_an_authority_without_a_list_is_refused(scene: Scene, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other", "Other CA")
    trusted = tmp_path / "trusted.pem"
    trusted.write_text(scene.authority.certificate.read_text() + other.certificate.read_text())
    context = load_server_context(replace(scene.files, ca=str(trusted))).context
    with TlsListener(context) as listener:
        stranger = client_context(scene.authority.certificate, other.issue("stranger", names=()))
        assert is_refused(listener, stranger)
        wait_until(lambda: listener.failures() == {"revocation_list": 1}, 20, "the failure")
    scene.list.write_text(scene.authority.revocation_list() + other.revocation_list())
    context = load_server_context(replace(scene.files, ca=str(trusted))).context
    with TlsListener(context) as listener, listener.connect(stranger) as client:
        assert echoes(client)


@pytest.mark.full
def test_broker_does_not_connect_to_one_whose_certificate_is_revoked(scene: Scene) -> None:
    with TlsListener(load_server_context(scene.files).context) as listener:
        with listener.connect(load_dialler_context(scene.files)) as client:
            assert echoes(client)
        scene.revoke(scene.issued)
        with pytest.raises(ssl.SSLCertVerificationError, match="certificate revoked"):
            listener.connect(load_dialler_context(scene.files))


def refusals(files: TlsFiles) -> list[str]:
    """Why a listener and a broker that connects refuse the files."""
    lines = []
    for load in (load_server_context, load_dialler_context):
        with pytest.raises(ConfigError) as refused:
            load(files)
        lines.append(str(refused.value))
    return lines


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no revocation list in PEM format"),
        ("-----BEGIN X509 CRL-----\nMAA=\n-----END X509 CRL-----\n", "cannot be read"),
        ("expired", "has expired"),
        ("later", "is not valid yet"),
        ("of another authority", "the issuer of a revocation list"),
    ],
)
def test_list_that_cannot_be_used_is_refused_with_one_line(
    scene: Scene, tmp_path: Path, text: str, reason: str
) -> None:
    if text == "expired":
        text = scene.authority.revocation_list(dates=LONG_AGO)
    elif text == "later":
        text = scene.authority.revocation_list() + scene.authority.revocation_list(dates=LATER)
    elif text == "of another authority":
        other = Authority(tmp_path / "other", "Other CA")
        text = scene.authority.revocation_list() + other.revocation_list()
    scene.list.write_text(text)
    for line in refusals(scene.files):
        assert reason in line
        assert str(scene.list) in line
        assert "\n" not in line


@pytest.mark.parametrize("label", ["CERTIFICATE", "X509 CERTIFICATE", "TRUSTED CERTIFICATE"])
def test_certificate_beside_the_lists_does_not_become_an_authority(
    scene: Scene, tmp_path: Path, label: str
) -> None:
    evil = Authority(tmp_path / "evil", "Evil CA")
    added = evil.certificate.read_text().replace(" CERTIFICATE-", f" {label}-")
    assert f"BEGIN {label}-" in added
    scene.list.write_text(scene.authority.revocation_list() + evil.revocation_list() + added)
    expected = f"{scene.list} contains a certificate; it may contain revocation lists only"
    assert refusals(scene.files) == [expected, expected]


@pytest.mark.parametrize("in_memory", [True, False])
def test_context_gets_the_lists_that_were_checked_and_nothing_else_of_their_file(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    """Also if the search for certificates in the file misses one."""
    evil = Authority(tmp_path / "evil", "Evil CA")
    scene.list.write_text(evil.certificate.read_text() + scene.authority.revocation_list(scene.mallory))
    monkeypatch.setattr(contexts, "_ANY_CERTIFICATE", re.compile("(?!)"))
    if not in_memory:
        monkeypatch.setattr(contexts, "_HAS_MEMFD", False)
    server = load_server_context(scene.files).context
    for context in (server, load_dialler_context(scene.files)):
        assert context.cert_store_stats() == {"x509": 1, "crl": 1, "x509_ca": 1}
    with TlsListener(server) as listener:
        assert is_refused(listener, scene.context(scene.mallory))
        stranger = client_context(scene.authority.certificate, evil.issue("stranger", names=()))
        assert is_refused(listener, stranger)
        wait_until(lambda: listener.failures() == {"revoked": 1, "unknown_ca": 1}, 20, "the failures")
        with listener.connect(scene.context(scene.alice)) as client:
            assert echoes(client)


def is_open(client: ssl.SSLSocket) -> bool:
    """Whether a request is answered."""
    with contextlib.suppress(OSError):
        client.sendall(API_VERSIONS)
        return client.recv(1 << 16) != b""
    return False


def test_open_connection_ends_when_its_certificate_is_revoked_and_the_old_list_stays_while_the_new_is_invalid(
    scene: Scene, tmp_path: Path
) -> None:
    def connect(client: Certificate) -> ssl.SSLSocket:
        plain = socket.create_connection(("localhost", broker.port), timeout=scaled(30))
        return scene.context(client).wrap_socket(plain, server_hostname="localhost")

    settings = {"ssl_crl_location": str(scene.list)}
    with tls_broker(tmp_path / "data", scene.files, **settings) as broker:
        alice, mallory = connect(scene.alice), connect(scene.mallory)
        assert is_open(alice)
        assert is_open(mallory)
        certificates = broker.certificates
        for failures, text in enumerate(("not a list", scene.authority.revocation_list(dates=LATER)), 1):
            scene.list.write_text(text)
            broker.broker._call(broker.reload(), 30)
            wait_until(lambda count=failures: certificates.failures == count, 30, "the refusal of the file")
            assert is_open(mallory)
            with connect(scene.alice) as another:
                assert is_open(another)
        scene.revoke(scene.mallory)
        broker.renew()
        mallory.settimeout(scaled(60))
        with contextlib.suppress(ConnectionError):
            assert mallory.recv(1) == b""
        assert is_open(alice)
        with contextlib.suppress(OSError), connect(scene.mallory) as again:
            assert not is_open(again)
        assert broker.server.counters.authentication_failures["revoked"] == 1
        alice.close()
        mallory.close()


@pytest.mark.full
def test_requests_over_http_and_sqs_are_refused_once_the_certificate_is_revoked(scene: Scene) -> None:
    settings = {
        "listeners": "SSL://localhost:0",
        "inter_broker_listener_name": "SSL",
        "http_security_protocol": "SSL",
        "sqs_security_protocol": "SSL",
        "ssl_certificate_location": scene.files.certificate,
        "ssl_key_location": scene.files.key,
        "ssl_ca_location": scene.files.ca,
        "ssl_client_auth": "required",
        "ssl_crl_location": scene.files.crl,
    }
    list_queues = {"Action": "ListQueues", "Version": "2012-11-05"}
    with (
        TestBroker(**settings) as broker,
        httpx.Client(verify=scene.context(scene.mallory), timeout=scaled(20)) as client,
    ):
        http_url, sqs_url = (
            url.replace("127.0.0.1", "localhost") for url in (broker.http_url, broker.sqs_url)
        )
        assert client.get(f"{http_url}/v1/topics").status_code == 200
        assert client.post(sqs_url, data=list_queues).status_code == 200
        scene.revoke(scene.mallory)
        broker._running().reload_certificates()
        wait_until(lambda: client.get(f"{http_url}/v1/topics").status_code == 401, 30, "the refusal")
        assert client.post(sqs_url, data=list_queues).status_code == 403
