"""Renewal of a broker's certificates while it runs: those of its listeners, and what it needs to connect to others.

The files are read again when they have changed, which is checked every `CHECK_INTERVAL_MS`, and on request (SIGHUP).
New files become a new context only if they pass the checks of `load_server_context`; otherwise the context in use
stays. New connections use the new context, and open ones keep theirs. Where the broker connects to others, the files
make two contexts, which are renewed together: what the broker shows and what it accepts are of one version.

Invariants:
* Files are read on a thread: a hanging file system does not stop the event loop.
* A failure is logged and counted once, however often it is found again. Files that failed are tried again even if they
  do not change, because a certificate may become valid.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

from mansio.errors import ConfigError
from mansio.logs import fields
from mansio.net.tls.contexts import ServerContext, load_dialler_context, load_server_context

if TYPE_CHECKING:
    import ssl

    from mansio.net.tls.contexts import TlsFiles
    from mansio.ports import Background, Scheduler, Timer
    from mansio.state.authentication.revocation import RevocationLists

    Stamps = tuple[tuple[int, int, int] | None, ...]
    """Modification time, size and inode of each file; None for one that cannot be read."""

logger = logging.getLogger(__name__)

CHECK_INTERVAL_MS: Final = 10_000


class _Loaded(NamedTuple):
    """Contexts of one version of the files. `dialler`: None if the broker does not connect to others."""

    server: ServerContext
    dialler: ssl.SSLContext | None


class CertificateReloader:
    """The contexts of a broker, renewed when their files change. Belongs to one event loop."""

    def __init__(
        self,
        files: TlsFiles,
        scheduler: Scheduler,
        thread: Background,
        *,
        dials: bool = False,
        logs_in: bool = False,
    ) -> None:
        """Load the files. `dials`: whether the broker connects to listeners of other brokers; `logs_in`: whether
        clients of those log in, so that they ask for no certificate. Raises `ConfigError` if the files cannot be
        used."""
        self._files = files
        self._scheduler = scheduler
        self._thread = thread
        self._dials = dials
        self._logs_in = logs_in
        self._stamps = _stamps_of(files)
        self._digests: WeakKeyDictionary[ssl.SSLContext, bytes] = WeakKeyDictionary()
        """Of the certificates in the contexts that connections still have."""
        self._contexts = _load(files, dials=dials, logs_in=logs_in)
        self._note_digest()
        self._failure = ""
        """Why the files could not be used when they were last read; empty if they could."""
        self._expired_lists: RevocationLists | None = None
        """The lists whose expiry was logged."""
        self._is_loading = False
        self._is_requested = False
        self._is_stopped = False
        self._timer: Timer | None = None
        self.reloads = 0
        """Number of contexts that replaced another one."""
        self.failures = 0
        """Number of changes that could not be used."""

    @property
    def files(self) -> TlsFiles:
        """The files that are read."""
        return self._files

    @property
    def context(self) -> ssl.SSLContext:
        """The context for new connections."""
        return self._contexts.server.context

    def context_for(self, *, log_ins: bool) -> ssl.SSLContext:
        """Return the context for new connections of a listener whose clients log in, or of another one."""
        server = self._contexts.server
        return server.context_for_log_ins if log_ins else server.context

    @property
    def server_context(self) -> ServerContext:
        """The context for new connections, and the expiry and the digest of its certificate."""
        return self._contexts.server

    @property
    def revocations(self) -> RevocationLists | None:
        """The revocation lists; None if there are none."""
        return self._contexts.server.revocations

    @property
    def dialler_context(self) -> ssl.SSLContext:
        """The context for new connections to other brokers."""
        assert self._contexts.dialler is not None, "made for a broker that does not connect to others"
        return self._contexts.dialler

    def certificate_sha256(self, context: ssl.SSLContext) -> bytes:
        """Return the digest of the certificate in a context of connections, which may not be the current one."""
        return self._digests[context]

    def start(self) -> None:
        """Begin to watch the files."""
        self._timer = self._scheduler.call_later(CHECK_INTERVAL_MS, self.check)

    def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reload(self) -> None:
        """Read the files again, whether or not they have changed (SIGHUP)."""
        self._is_requested = True
        self.check()

    def check(self) -> None:
        """Read the files again if they have changed, or if they could not be used before."""
        if self._is_loading or self._is_stopped:
            return
        self._warn_of_expired_lists()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_loading = True
        is_requested, self._is_requested = self._is_requested, False
        before = None if is_requested or self._failure else self._stamps

        def loaded(result: tuple[Stamps, _Loaded | None] | None, error: BaseException | None) -> None:
            self._on_loaded(result, error, is_requested=is_requested)

        self._thread.submit(
            lambda: _load_changed(self._files, before, dials=self._dials, logs_in=self._logs_in), loaded
        )

    def _warn_of_expired_lists(self) -> None:
        """Log once that a revocation list in use has expired, so that no certificate of its authority is accepted."""
        revocations = self.revocations
        if revocations is None or revocations is self._expired_lists or revocations.expires_s is None:
            return
        if revocations.expires_s < time.time():
            self._expired_lists = revocations
            effect = "new connections with certificates of its authority are refused"
            logger.error("tls_revocation_list_expired", extra=fields(file=self._files.crl, effect=effect))

    def _on_loaded(
        self,
        result: tuple[Stamps, _Loaded | None] | None,
        error: BaseException | None,
        *,
        is_requested: bool,
    ) -> None:
        self._is_loading = False
        if self._is_stopped:
            return
        if error is not None or result is None:
            self._on_failed(str(error), is_requested=is_requested)
        elif (contexts := result[1]) is not None:
            self._stamps = result[0]
            self._contexts = contexts
            self._note_digest()
            self._failure = ""
            self.reloads += 1
            expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(contexts.server.expires_s))
            logger.info(
                "tls_certificate_renewed", extra=fields(file=self._files.certificate, expires=expires)
            )
        if self._is_requested:
            self.check()
        else:
            self.start()

    def _note_digest(self) -> None:
        server = self._contexts.server
        for context in (server.context, server.context_for_log_ins):
            self._digests[context] = server.certificate_sha256

    def _on_failed(self, reason: str, *, is_requested: bool) -> None:
        if reason == self._failure and not is_requested:
            return
        self._failure = reason
        self.failures += 1
        logger.warning("tls_certificate_not_renewed", extra=fields(reason=reason, remains="the one before"))


def _load(files: TlsFiles, *, dials: bool, logs_in: bool) -> _Loaded:
    server = load_server_context(files)
    return _Loaded(server, load_dialler_context(files, logs_in=logs_in) if dials else None)


def _load_changed(
    files: TlsFiles, before: Stamps | None, *, dials: bool, logs_in: bool
) -> tuple[Stamps, _Loaded | None]:
    """Load the files, unless their stamps are those of `before`; return their stamps as of before the load, so that a
    change in the meantime is found by the next check."""
    stamps = _stamps_of(files)
    if stamps == before:
        return stamps, None
    try:
        return stamps, _load(files, dials=dials, logs_in=logs_in)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error


def _stamps_of(files: TlsFiles) -> Stamps:
    stamps: list[tuple[int, int, int] | None] = []
    for path in files.paths:
        try:
            status = os.stat(path)  # of the file behind a link: Kubernetes renews a secret by another link
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(stamps)
