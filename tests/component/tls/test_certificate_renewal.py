"""Certificates of a listener are renewed while it runs; files that cannot be used leave the earlier ones in force."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mansio.errors import ConfigError
from mansio.net.tls.certificate_reloader import CHECK_INTERVAL_MS, CertificateReloader
from support.certificates import Authority, Certificate
from support.logs import BenchScheduler, ManualBackground
from support.tls_listener import TlsListener, client_context, echoes, is_refused, tls_files

if TYPE_CHECKING:
    from pathlib import Path


class Bench:
    """A reloader whose timers and thread the test runs."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory / "authority")
        self.files = Certificate(directory / "listener.pem", directory / "listener.key")
        self._stamp_ns = 1_700_000_000_000_000_000
        self.install(self.authority.issue())
        self.scheduler = cast("Any", BenchScheduler())
        self.thread = cast("Any", ManualBackground())
        self.reloader = CertificateReloader(
            tls_files(self.files, self.authority), self.scheduler, self.thread
        )
        self.reloader.start()

    def install(self, issued: Certificate) -> None:
        for source, target in zip(issued, self.files, strict=True):
            self.install_file(source, target)

    def install_file(self, source: Path, target: Path) -> None:
        """Replace a file, with a new modification time: two writes may have the same one."""
        shutil.copy(source, target)
        self._stamp_ns += 1_000_000_000
        os.utime(target, ns=(self._stamp_ns, self._stamp_ns))

    def pass_interval(self) -> None:
        ((delay_ms, _),) = self.scheduler.timers
        assert delay_ms == CHECK_INTERVAL_MS == 10_000
        self.scheduler.fire()
        self.thread.run_all()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.mansio_fields["reason"]  # type: ignore[attr-defined]
        for record in caplog.records
        if record.message == "tls_certificate_not_renewed"
    ]


def test_changed_files_are_used_after_the_next_check(bench: Bench) -> None:
    before = bench.reloader.server_context
    bench.pass_interval()
    assert bench.reloader.server_context is before
    bench.install(bench.authority.issue())
    bench.pass_interval()
    assert bench.reloader.server_context.certificate_sha256 != before.certificate_sha256
    assert bench.reloader.context is not before.context
    assert (bench.reloader.reloads, bench.reloader.failures) == (1, 0)


def test_files_behind_a_link_that_changes_are_used(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    issued = bench.authority.issue()
    for source, target in zip(issued, bench.files, strict=True):
        target.unlink()
        target.symlink_to(source)
    bench.pass_interval()
    assert bench.reloader.reloads == 1


def test_request_reads_files_that_have_not_changed(bench: Bench) -> None:
    before = bench.reloader.context
    bench.reloader.reload()
    bench.reloader.reload()  # while the first one is in progress
    bench.thread.run_all()
    assert bench.reloader.context is not before
    assert bench.reloader.reloads == 2


def test_files_that_cannot_be_used_leave_the_earlier_ones_in_force_with_one_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    before = bench.reloader.server_context
    expired = bench.authority.issue(days=-1)
    other = bench.authority.issue()
    bench.install(expired)
    for _ in range(3):
        bench.pass_interval()
    assert warnings(caplog) == [
        f"a certificate in {bench.files.certificate} is not valid: certificate has expired"
    ]
    bench.install_file(other.certificate, bench.files.certificate)  # its key is not there yet
    for _ in range(2):
        bench.pass_interval()
    assert len(warnings(caplog)) == 2
    assert "does not fit" in warnings(caplog)[1]
    bench.files.certificate.unlink()
    bench.pass_interval()
    assert "No such file" in warnings(caplog)[2]
    assert bench.reloader.server_context is before
    assert (bench.reloader.reloads, bench.reloader.failures) == (0, 3)
    bench.install(other)
    bench.pass_interval()
    assert bench.reloader.server_context is not before
    assert (bench.reloader.reloads, bench.reloader.failures) == (1, 3)


def test_certificate_that_becomes_valid_is_used_without_another_change(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_yet(*_: object) -> None:
        raise ConfigError("not yet valid")

    bench.install(bench.authority.issue())
    with monkeypatch.context() as patch:
        patch.setattr("mansio.net.tls.certificate_reloader.load_server_context", not_yet)
        bench.pass_interval()
    assert bench.reloader.reloads == 0
    bench.pass_interval()
    assert bench.reloader.reloads == 1


def test_each_request_for_files_that_cannot_be_used_is_answered_with_a_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.files.key.write_text("no key")
    for _ in range(2):
        bench.reloader.reload()
        bench.thread.run_all()
    assert len(warnings(caplog)) == 2


def test_a_stopped_reloader_reads_nothing(bench: Bench) -> None:
    bench.reloader.check()
    bench.reloader.stop()
    bench.install(bench.authority.issue())
    bench.thread.run_all()
    bench.reloader.reload()
    bench.scheduler.fire()
    assert not bench.thread.jobs
    assert bench.reloader.reloads == 0


def test_listener_with_files_that_cannot_be_used_does_not_start(tmp_path: Path) -> None:
    expired = Authority(tmp_path).issue(days=-1)
    with pytest.raises(ConfigError, match="has expired"):
        CertificateReloader(tls_files(expired), Any, Any)  # type: ignore[arg-type]  # neither is used


def test_renewed_authority_is_required_of_new_clients_and_open_connections_go_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    authority = bench.authority
    bench.reloader.stop()
    ca = tmp_path / "ca.pem"
    bench.install_file(authority.certificate, ca)
    files = replace(tls_files(bench.files, authority, "required"), ca=str(ca))
    reloader = CertificateReloader(files, bench.scheduler, bench.thread)
    old = client_context(authority.certificate, authority.issue("old", names=()))
    with TlsListener(reloader.context) as listener:
        connected = listener.connect(old)
        assert echoes(connected)
        renewed = Authority(tmp_path / "renewed", "Renewed CA")
        bench.install_file(renewed.certificate, ca)
        bench.install(renewed.issue())
        reloader.reload()
        bench.thread.run_all()
        listener.context = reloader.context
        with listener.connect(client_context(renewed.certificate, renewed.issue("new", names=()))) as new:
            assert echoes(new)
        mixed = client_context(renewed.certificate, authority.issue("old", names=()))
        assert is_refused(listener, mixed)
        assert echoes(connected)
        connected.close()


def test_the_digest_of_an_earlier_context_stays_known_while_a_connection_has_it(bench: Bench) -> None:
    reloader = bench.reloader
    earlier = reloader.server_context
    bench.install(bench.authority.issue())
    bench.pass_interval()
    renewed = reloader.server_context
    assert renewed.certificate_sha256 != earlier.certificate_sha256
    for known in (earlier, renewed):
        assert reloader.certificate_sha256(known.context) == known.certificate_sha256


def test_what_a_broker_trusts_is_renewed_with_what_it_shows(bench: Bench, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.pem"
    bench.install_file(bench.authority.certificate, trusted)
    files = replace(tls_files(bench.files), ca=str(trusted))
    scheduler, thread = cast("Any", BenchScheduler()), cast("Any", ManualBackground())
    reloader = CertificateReloader(files, scheduler, thread, dials=True)
    other = Authority(tmp_path / "other", "Other CA")
    with TlsListener(reloader.context) as listener:
        assert not is_refused(listener, reloader.dialler_context)
        bench.install_file(other.certificate, trusted)
        reloader.check()
        thread.run_all()
        assert reloader.failures == 1, "its own certificate is of an authority that it does not trust"
        assert not is_refused(listener, reloader.dialler_context)
        bench.install(other.issue())
        reloader.check()
        thread.run_all()
        assert is_refused(listener, reloader.dialler_context), "the listener has its earlier certificate"
    with TlsListener(reloader.context) as listener:
        assert not is_refused(listener, reloader.dialler_context)
