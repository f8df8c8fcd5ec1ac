"""A protected start: what it makes is used again, is renewed in time, and is readable by its user only."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import stat
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest

import mansio
from mansio.api.http.broker_stats import RunningBroker
from mansio.api.http.service_stats import ServiceStats
from mansio.api.kafka.server.listener import KafkaServer
from mansio.config.protected_start import FIRST_USER
from mansio.config.sources import load_settings
from mansio.errors import (
    AuthenticationFailed,
    ClusterAuthorizationFailed,
    ConfigError,
    DataDirectoryLocked,
    MissingExtra,
)
from mansio.host.asyncio_loop import new_event_loop
from mansio.net.tls.certificate_authority import CERTIFICATE_DAYS, RENEWAL_DAYS, CertificateAuthority, utc_now
from mansio.net.tls.contexts import ServerContext
from mansio.node.broker import Broker
from mansio.node.protected_start import ProtectedStart
from mansio.state.authorization.roles import Role, acls_of_role
from support.authorization import PEER
from support.present import present
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from datetime import datetime
    from pathlib import Path

    from mansio.config.settings import Settings


def protected_settings(directory: Path, **flags: Any) -> Settings:
    known = {"listeners": "127.0.0.1:0", "http_listener": "", "offsets_topic_num_partitions": 1, **flags}
    return load_settings(None, {"data_dir": str(directory), **known}, environment=False, is_protected=True)


@asynccontextmanager
async def started(
    directory: Path, now: Callable[[], datetime] = utc_now, **flags: Any
) -> AsyncIterator[tuple[Broker, ProtectedStart]]:
    settings = protected_settings(directory, **flags)
    protected_start = ProtectedStart.of_broker(settings, now)
    broker = Broker(settings, protected_start=protected_start)
    await broker.start()
    try:
        yield broker, protected_start
    finally:
        await broker.stop()


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)


def stored(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((directory / "security").iterdir())}


def password_in(directory: Path) -> str:
    return (directory / "security" / "admin.password").read_text().removesuffix("\n")


async def log_in(broker: Broker, directory: Path, password: str, user: str = FIRST_USER) -> None:
    """Connect as a client that trusts the stored authority only."""
    ca = str(directory / "security" / "ca.pem")
    async with mansio.connect(str(broker.listener_address), tls=ca, user=user, password=password) as client:
        await client.admin.describe_cluster()


def certificate_names(pem: bytes) -> set[str]:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def test_a_restart_keeps_authority_certificate_user_and_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"

    async def work() -> None:
        async with started(data) as (broker, first):
            password = password_in(data)
            assert first.new_password == password
            await log_in(broker, data, password)
            with pytest.raises(AuthenticationFailed):
                await log_in(broker, data, password + "x")
        before = stored(data)
        async with started(data) as (broker, again):
            assert again.new_password is None
            await log_in(broker, data, password)
        assert stored(data) == before
        assert set(before) == {"admin.password", "authority.pem", "broker.pem", "ca.pem", "secrets.key"}
        assert b"PRIVATE" not in before["ca.pem"]

    with caplog.at_level(logging.DEBUG):
        run(work())
    directory = data / "security"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    logged = [f"{record.getMessage()} {vars(record)}" for record in caplog.records]
    assert "certificate_issued" in " ".join(logged)
    assert not [line for line in logged if password_in(data) in line]


def test_files_are_not_made_while_another_broker_uses_the_data_directory(tmp_path: Path) -> None:
    settings = protected_settings(tmp_path)
    Broker(settings, protected_start=ProtectedStart.of_broker(settings)).prepare_files()
    first = stored(tmp_path)

    async def work() -> None:
        async with started(tmp_path):
            (tmp_path / "security/broker.pem").unlink()
            with pytest.raises(DataDirectoryLocked):
                Broker(settings, protected_start=ProtectedStart.of_broker(settings)).prepare_files()
            assert not (tmp_path / "security/broker.pem").exists()

    run(work())
    assert set(first) == {"authority.pem", "broker.pem", "ca.pem", "secrets.key"}
    assert stored(tmp_path)["ca.pem"] == first["ca.pem"]


@pytest.mark.full
def test_no_listener_accepts_before_the_user_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    listen = KafkaServer.listen

    async def listen_later(server: KafkaServer, *arguments: Any) -> None:
        counts.append(server.service.users.user_count)
        await listen(server, *arguments)

    monkeypatch.setattr(KafkaServer, "listen", listen_later)

    async def work() -> None:
        async with started(tmp_path):
            pass

    run(work())
    assert counts == [1]


@pytest.mark.full
@pytest.mark.parametrize(("days", "is_renewed"), [(RENEWAL_DAYS + 1, False), (RENEWAL_DAYS - 1, True)])
def test_certificate_is_renewed_by_the_same_authority_before_it_expires(
    tmp_path: Path, days: int, is_renewed: bool
) -> None:
    issued = utc_now() - timedelta(days=CERTIFICATE_DAYS - days)

    async def work() -> None:
        async with started(tmp_path, lambda: issued):
            first = stored(tmp_path)
        for _ in range(2):
            async with started(tmp_path) as (broker, _):
                await log_in(broker, tmp_path, password_in(tmp_path))
                second = stored(tmp_path)
            assert {name for name in first if second[name] != first[name]} == (
                {"broker.pem"} if is_renewed else set()
            )

    run(work())


def test_a_running_broker_renews_its_certificate_and_keeps_its_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mansio.node.certificate_renewal.RENEWAL_CHECK_MS", 20)
    times = [utc_now() - timedelta(days=CERTIFICATE_DAYS - RENEWAL_DAYS + 1)]

    async def work() -> None:
        async with started(tmp_path, lambda: times[-1]) as (broker, _):
            reloader = present(broker.certificates)
            first, shown = stored(tmp_path), reloader.server_context.certificate_sha256
            ca, password = str(tmp_path / "security" / "ca.pem"), password_in(tmp_path)
            address = str(broker.listener_address)
            async with mansio.connect(address, tls=ca, user=FIRST_USER, password=password) as client:
                await client.admin.describe_cluster()
                times.append(utc_now())
                await eventually(lambda: reloader.server_context.certificate_sha256 != shown)
                await client.admin.describe_cluster()
                await log_in(broker, tmp_path, password)
            renewed = stored(tmp_path)
            assert {name for name in first if renewed[name] != first[name]} == {"broker.pem"}
            assert reloader.reloads == 1

    run(work())


@pytest.mark.full
def test_a_certificate_that_is_not_renewed_is_reported_before_it_expires(tmp_path: Path) -> None:
    async def work() -> None:
        days = CERTIFICATE_DAYS - 7
        async with started(tmp_path, lambda: utc_now() - timedelta(days=days)):
            (tmp_path / "security" / "authority.pem").unlink()
        async with started(tmp_path) as (broker, protected_start):
            assert not protected_start.renew_certificates()
            view = ServiceStats(broker.settings)
            running = RunningBroker(
                broker.service, broker.server, broker.clients, broker.listener_address, lambda: True
            )
            view.attach(replace(running, certificates=broker.certificates))
            (left_s,) = [
                each.value for each in view.measurements() if each.name == "tls_certificate_expiry_seconds"
            ]
            assert timedelta(days=6) < timedelta(seconds=left_s) <= timedelta(days=7)
            (warning,) = broker.service.health.report(caller=PEER).warnings
            assert warning.reason == "certificate_expires_soon"
            assert "broker.pem expires in " in warning.detail

    run(work())


@pytest.mark.full
def test_a_renewal_that_fails_is_reported_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mansio.node.certificate_renewal.RENEWAL_CHECK_MS", 20)
    times = [utc_now() - timedelta(days=CERTIFICATE_DAYS - RENEWAL_DAYS + 1)]

    async def work() -> None:
        async with started(tmp_path, lambda: times[-1]) as (broker, protected_start):
            authority = tmp_path / "security" / "authority.pem"
            intact = authority.rename(tmp_path / "intact.pem")
            authority.write_bytes(b"damaged")
            times.append(utc_now())
            await eventually(lambda: "certificate_not_issued" in caplog.text)
            with pytest.raises(ConfigError, match=r"authority\.pem"):
                protected_start.renew_certificates()
            intact.rename(authority)
            await eventually(lambda: present(broker.certificates).reloads == 1)

    run(work())
    failed = [record for record in caplog.records if record.getMessage() == "certificate_not_issued"]
    assert len(failed) == 1
    assert "damaged" not in caplog.text


def test_a_certificate_expires_soon_by_its_own_validity() -> None:
    day_s = 24 * 60 * 60

    def expires_soon(validity_days: float, left_days: float) -> bool:
        context = cast("Any", None)
        expires_s = int(validity_days * day_s)
        found = ServerContext(context, context, 0, expires_s, b"", None)
        return found.expires_soon(expires_s - left_days * day_s)

    assert expires_soon(397, 13)
    assert not expires_soon(397, 15)
    assert expires_soon(1, 0.2)
    assert not expires_soon(1, 0.3)


@pytest.mark.full
def test_certificate_is_renewed_for_a_new_advertised_name(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path):
            first = stored(tmp_path)
            assert {"localhost", "127.0.0.1", "::1"} <= certificate_names(first["broker.pem"])
        async with started(tmp_path, advertised_listeners="broker.example:9092"):
            renewed = stored(tmp_path)
        assert "broker.example" in certificate_names(renewed["broker.pem"])
        assert renewed["ca.pem"] == first["ca.pem"]

    run(work())


@pytest.mark.full
def test_start_after_a_crash_between_password_and_user_creates_the_user_with_it(tmp_path: Path) -> None:
    directory = tmp_path / "security"
    directory.mkdir(mode=0o755)
    (directory / "admin.password").write_text("fromTheFirstStart\n")
    (directory / "authority.pem.new").write_text("half of a file")
    (directory / "authority.pem.new").chmod(0o644)

    async def work() -> None:
        async with started(tmp_path) as (broker, _):
            await log_in(broker, tmp_path, "fromTheFirstStart")

    run(work())
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "authority.pem").stat().st_mode) == 0o600


@pytest.mark.full
def test_a_changed_password_and_a_deleted_user_stay_so(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as (broker, _):
            users = broker.service.users
            await users.create("other", "otherPassword")
            await users.set_password(FIRST_USER, "changed", is_confidential=True, caller=PEER)
        async with started(tmp_path) as (broker, again):
            assert again.new_password is None
            await log_in(broker, tmp_path, "changed")
            with pytest.raises(AuthenticationFailed):
                await log_in(broker, tmp_path, password_in(tmp_path))
            async with mansio.connect(
                str(broker.listener_address),
                tls=str(tmp_path / "security/ca.pem"),
                user="other",
                password="otherPassword",
            ) as client:
                with pytest.raises(ClusterAuthorizationFailed):
                    await client.admin.users.delete(FIRST_USER)
                acls = acls_of_role(Role.OPERATOR, "User:other", {})
                assert not any(await broker.service.acls.create_each(acls, caller=PEER))
                await client.admin.users.delete(FIRST_USER)
        (tmp_path / "security/admin.password").unlink()
        async with started(tmp_path) as (broker, again):
            assert [user.name for user in broker.service.users.describe(caller=PEER)] == ["other"]
            files = again.write_client_files(str(broker.listener_address))
            assert (files.password, files.kcat) == (None, None)

    run(work())
    assert not (tmp_path / "security/admin.password").exists()
    assert not (tmp_path / "security/kcat.conf").exists()


@pytest.mark.full
def test_broker_starts_without_the_key_of_its_authority_and_with_a_new_authority(tmp_path: Path) -> None:
    directory = tmp_path / "security"

    async def work() -> None:
        async with started(tmp_path):
            first = stored(tmp_path)
        (directory / "authority.pem").unlink()
        async with started(tmp_path) as (broker, _):
            assert stored(tmp_path) == {name: first[name] for name in first if name != "authority.pem"}
            await log_in(broker, tmp_path, password_in(tmp_path))
        (directory / "broker.pem").unlink()
        with pytest.raises(ConfigError, match=r"authority\.pem is missing: restore it, or remove .*ca\.pem"):
            async with started(tmp_path):
                pytest.fail("it has no certificate")
        (directory / "ca.pem").unlink()
        async with started(tmp_path) as (broker, _):
            await log_in(broker, tmp_path, password_in(tmp_path))
        assert stored(tmp_path)["ca.pem"] != first["ca.pem"]
        (directory / "authority.pem").write_bytes(first["authority.pem"])  # another one than that of ca.pem
        async with started(tmp_path) as (broker, _):
            await log_in(broker, tmp_path, password_in(tmp_path))
        assert stored(tmp_path)["ca.pem"] == first["ca.pem"]

    run(work())


@pytest.mark.full
@pytest.mark.parametrize("content", [b"", b"no certificate", None])
def test_damaged_authority_ends_the_start_and_is_not_replaced(tmp_path: Path, content: bytes | None) -> None:
    directory = tmp_path / "security"
    directory.mkdir()
    authority = CertificateAuthority.create(utc_now())
    other = CertificateAuthority.create(utc_now())
    damaged = authority.pem.replace(authority.certificate, other.certificate) if content is None else content
    (directory / "authority.pem").write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"cannot use .*/security/authority\.pem: it"):
        ProtectedStart.of_broker(protected_settings(tmp_path)).prepare_files()
    assert os.listdir(directory) == ["authority.pem"]


def test_start_without_the_package_for_certificates_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingExtra, match=r"pip install 'mansio-mq\[secure\]'"):
        ProtectedStart.of_broker(protected_settings(tmp_path)).prepare_files()


@pytest.mark.full
def test_damaged_certificate_is_issued_again(tmp_path: Path) -> None:
    ProtectedStart.of_broker(protected_settings(tmp_path)).prepare_files()
    path = tmp_path / "security/broker.pem"
    for damaged in (b"", path.read_bytes()[:300], CertificateAuthority.create(utc_now()).pem):
        path.write_bytes(damaged)
        ProtectedStart.of_broker(protected_settings(tmp_path)).prepare_files()
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(path)
        assert path.read_bytes() != damaged
