"""Files of certificates are checked before they are used, and an error is one line without their content."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest

from mansio.errors import ConfigError
from mansio.net.tls import contexts
from mansio.net.tls.contexts import load_client_context, load_server_context
from support.certificates import Authority, Certificate, encrypted_key
from support.tls_listener import client_context, server_context, tls_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def issued(authority: Authority) -> Certificate:
    return authority.issue()


def refusal(
    issued: Certificate, authority: Authority | None = None, client_authentication: str = "none"
) -> str:
    with pytest.raises(ConfigError) as refused:
        load_server_context(tls_files(issued, authority, client_authentication))
    line = str(refused.value)
    assert "\n" not in line
    for path in issued:
        if path.is_file():
            assert not any(secret in line for secret in path.read_text().split("\n")[1:-1] if secret)
    return line


def test_valid_files_are_accepted_with_and_without_the_authority(
    authority: Authority, issued: Certificate
) -> None:
    for ca in (None, authority):
        loaded = load_server_context(tls_files(issued, ca))
        assert loaded.context.minimum_version is ssl.TLSVersion.TLSv1_2
        assert loaded.context.options & ssl.OP_NO_RENEGOTIATION
        assert len(loaded.certificate_sha256) == 32
        assert loaded.expires_s > 0


def test_key_of_another_certificate_is_refused(authority: Authority, issued: Certificate) -> None:
    mixed = Certificate(issued.certificate, authority.issue().key)
    assert (
        refusal(mixed)
        == f"the private key in {mixed.key} does not fit the certificate in {mixed.certificate}"
    )


@pytest.mark.parametrize("with_authority", [True, False])
def test_expired_certificate_is_refused(authority: Authority, with_authority: bool) -> None:
    expired = authority.issue(days=-1)
    assert refusal(expired, authority if with_authority else None) == (
        f"a certificate in {expired.certificate} is not valid: certificate has expired"
    )


def test_certificate_of_another_authority_is_refused(
    authority: Authority, issued: Certificate, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "Other CA")
    line = refusal(issued, other)
    assert f"does not lead to an authority in {other.certificate}" in line


def test_missing_certificate_between_root_and_certificate_is_found(
    authority: Authority, tmp_path: Path
) -> None:
    between = Authority(tmp_path, "Between", issuer=authority)
    load_server_context(tls_files(between.issue(), authority))
    assert "does not lead to an authority" in refusal(between.issue(with_chain=False), authority)


def test_expired_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    between = Authority(tmp_path, "Between", issuer=authority, expired=True)
    issued = between.issue()
    expected = f"a certificate in {issued.certificate} is not valid: certificate has expired"
    assert refusal(issued, authority) == refusal(issued) == expected
    root = Authority(tmp_path / "root", "Expired root", expired=True)
    assert refusal(root.issue(), root).startswith("an authority of the certificate in ")


def test_certificate_for_clients_only_is_refused_on_a_listener(authority: Authority) -> None:
    client = authority.issue(names=(), purposes=("clientAuth",))
    assert "purpose" in refusal(client, authority)


def test_files_that_are_missing_empty_mixed_up_or_no_files_are_named(
    authority: Authority, issued: Certificate, tmp_path: Path
) -> None:
    missing, empty = tmp_path / "missing.pem", tmp_path / "empty.pem"
    empty.write_text("")
    assert refusal(Certificate(missing, issued.key)) == f"cannot read {missing}: No such file or directory"
    assert refusal(Certificate(empty, issued.key)) == f"{empty} contains no certificate in PEM format"
    assert refusal(Certificate(issued.certificate, empty)) == f"{empty} contains no private key in PEM format"
    assert refusal(Certificate(issued.key, issued.key)).endswith("contains no certificate in PEM format")
    assert refusal(Certificate(tmp_path, issued.key)) == f"{tmp_path} is not a regular file"


def test_damaged_certificate_and_damaged_key_are_refused(issued: Certificate, tmp_path: Path) -> None:
    for number, path in enumerate(issued):
        lines = path.read_text().split("\n")
        damaged = tmp_path / path.name
        damaged.write_text("\n".join([lines[0], lines[1][::-1], *lines[2:]]))
        files = list(issued)
        files[number] = damaged
        assert str(damaged) in refusal(Certificate(*files))


def test_key_with_a_passphrase_is_refused_without_a_question(issued: Certificate, tmp_path: Path) -> None:
    encrypted = encrypted_key(issued.key, tmp_path / "encrypted.key")
    assert refusal(Certificate(issued.certificate, encrypted)).endswith(
        "has a passphrase; store it without one"
    )


def test_client_certificates_without_authorities_are_refused(issued: Certificate) -> None:
    assert refusal(issued, None, "required") == "client certificates are required, but no CA file is given"


def test_key_that_others_may_read_is_named_in_a_warning(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    issued = authority.issue()
    load_server_context(tls_files(issued))
    assert "tls_key_readable_by_others" not in caplog.text
    issued.key.chmod(0o644)
    load_server_context(tls_files(issued))
    assert "tls_key_readable_by_others" in caplog.text


def test_comments_beside_the_certificates_of_a_bundle_are_ignored(
    authority: Authority, issued: Certificate, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text(f"# Főtanúsítvány\n{authority.certificate.read_text()}", "utf-8")
    load_client_context(str(bundle))


def test_certificate_of_a_client_is_checked(authority: Authority, issued: Certificate) -> None:
    client = authority.issue("client", names=(), purposes=("clientAuth",))
    client_context(authority.certificate, client)
    for wrong in (authority.issue(days=-1), authority.issue(purposes=("serverAuth",))):
        with pytest.raises(ConfigError, match=f"a certificate in {wrong.certificate} is not valid"):
            client_context(authority.certificate, wrong)


def test_encrypted_key_of_a_client_needs_its_passphrase(
    authority: Authority, issued: Certificate, tmp_path: Path
) -> None:
    key = encrypted_key(issued.key, tmp_path / "encrypted.key", "right")
    files = str(authority.certificate), str(issued.certificate), str(key)
    load_client_context(*files, key_password="right")
    with pytest.raises(ConfigError, match=f"the passphrase of the private key in {key} is wrong"):
        load_client_context(*files, key_password="wrong")
    with pytest.raises(ConfigError, match="has a passphrase"):
        load_client_context(*files)


def connected(
    client: ssl.SSLContext, server: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Connect two contexts in memory, with a record in each direction."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = client.wrap_bio(to_client, to_server, server_hostname="localhost", session=session)
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    waiting = [theirs, ours]
    while waiting:
        for side in tuple(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
    ours.write(b"x")
    theirs.read()
    return theirs, ours


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("how", ["requested", "required"])
def test_session_of_a_client_certificate_is_not_resumed_after_the_certificate_has_expired(
    authority: Authority,
    issued: Certificate,
    monkeypatch: pytest.MonkeyPatch,
    version: ssl.TLSVersion,
    how: str,
) -> None:
    server = server_context(issued, authority, how)
    client = client_context(authority.certificate, authority.issue("someone", names=()))
    client.maximum_version = version
    first, _ = connected(client, server)
    if version is ssl.TLSVersion.TLSv1_3:
        assert first.session is None or not first.session.has_ticket, "TLS 1.3 gives no tickets"
        return
    again, ours = connected(client, server, first.session)
    assert again.session_reused
    certificate = ours.getpeercert()
    assert certificate is not None
    expires = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    monkeypatch.setattr("mansio.net.tls.contexts.time.time", lambda: expires + 1.0)
    with pytest.raises(contexts.ResumedSessionExpired):
        connected(client, server, first.session)


def test_sessions_end_with_their_context(authority: Authority, issued: Certificate) -> None:
    client = client_context(authority.certificate, authority.issue("someone", names=()))
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    first, _ = connected(client, server_context(issued, authority, "required"))
    again, _ = connected(client, server_context(issued, authority, "required"), first.session)
    assert not again.session_reused
