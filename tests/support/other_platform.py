"""Python as on another operating system: `python other_platform.py darwin serve ...` or `... win32 -c PROGRAM`.

Removes from this process what that system's Python does not have, then runs `mansio` or a program. The standard library
and the dependencies are imported before, with their Linux parts; only Mansio sees the other system. What macOS has and
Linux does not (F_FULLFSYNC, its limit of open files) is imitated; its kernel and file systems are not.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping

F_FULLFSYNC: Final = 51
OPEN_MAX: Final = 10_240
SOFT_LIMIT: Final = 256
FULL_SYNCS = 0
"""How often this process has called `F_FULLFSYNC`."""

LINUX_ONLY: Final = {
    "os": (
        *(
            "fdatasync",
            "sendfile",
            "posix_fallocate",
            "posix_fadvise",
            "RWF_NOWAIT",
            "RWF_DSYNC",
            "copy_file_range",
        ),
        *(
            "splice",
            "eventfd",
            "pidfd_open",
            "memfd_create",
            "sched_getaffinity",
            "sched_setaffinity",
            "O_DIRECT",
        ),
        *("getrandom", "setns", "unshare"),
    ),
    "socket": ("MSG_MORE", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "SO_REUSEPORT", "AF_NETLINK", "TCP_QUICKACK"),
    "select": ("epoll",),
    "time": ("CLOCK_BOOTTIME",),
    "signal": ("pidfd_send_signal", "SIGRTMIN", "SIGRTMAX"),
}
NEWER_MACOS_ONLY: Final = {"os": ("preadv", "pwritev", "preadv2", "pwritev2")}
POSIX_ONLY: Final = {
    "os": (
        *(
            "pread",
            "pwrite",
            "readv",
            "writev",
            "fork",
            "getuid",
            "geteuid",
            "getgid",
            "setsid",
            "killpg",
            "uname",
        ),
        *(
            "O_CLOEXEC",
            "O_NOFOLLOW",
            "O_DIRECTORY",
            "O_NONBLOCK",
            "fchmod",
            "fchown",
            "statvfs",
            "getloadavg",
        ),
        *("register_at_fork", "mkfifo", "getpgid", "setpgid", "waitid", "sysconf"),
    ),
    "socket": ("AF_UNIX", "SCM_RIGHTS", "CMSG_LEN"),
    "select": ("poll",),
    "time": ("clock_gettime", "CLOCK_MONOTONIC", "CLOCK_REALTIME", "tzset"),
    "signal": (
        "SIGKILL",
        "SIGHUP",
        "SIGPIPE",
        "SIGUSR1",
        "SIGCHLD",
        "pthread_sigmask",
        "setitimer",
    ),
}
STANDARD_MODULES: Final = (
    *(
        "asyncio",
        "concurrent.futures.thread",
        "ctypes",
        "encodings.idna",
        "multiprocessing",
        "platform",
        "random",
    ),
    *("shutil", "sqlite3", "ssl", "subprocess", "tempfile", "urllib.request", "uuid", "webbrowser"),
)
POSIX_MODULES: Final = ("fcntl", "resource", "pwd", "grp", "termios", "uvloop")


def imitate_macos() -> None:
    """macOS 10.15: Linux-only calls are missing, `F_FULLFSYNC` exists, "unlimited" open files cannot be set."""
    import fcntl
    import resource

    _import_first()
    _remove(LINUX_ONLY, NEWER_MACOS_ONLY)
    _hide_proc()
    true_control, true_limit = fcntl.fcntl, resource.setrlimit
    import os

    def control(descriptor: Any, command: int, argument: Any = 0) -> Any:
        global FULL_SYNCS
        if command != F_FULLFSYNC:
            return true_control(descriptor, command, argument)
        FULL_SYNCS += 1
        os.fsync(descriptor)
        return 0

    def set_limit(kind: int, limits: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_NOFILE and not 0 <= limits[0] <= OPEN_MAX:
            raise ValueError("current limit exceeds maximum limit")
        true_limit(kind, (limits[0], resource.getrlimit(kind)[1]) if limits[1] < 0 else limits)

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    true_limit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, hard))
    fcntl.fcntl = control
    vars(fcntl)["F_FULLFSYNC"] = F_FULLFSYNC
    resource.setrlimit = set_limit
    atexit.register(lambda: print(f"full syncs: {FULL_SYNCS}", file=sys.stderr, flush=True))
    sys.platform = "darwin"


def imitate_windows() -> None:
    """Windows: no POSIX modules and calls; an event loop that, as the proactor loop, handles neither signals nor file
    descriptors and hands over received bytes in its own buffers."""
    _import_first("click", "typer", "rich.console", "pydantic_settings", "kio", "crc32c", "cramjam")
    _use_proactor_interface()
    _use_disk_usage_of_windows()
    _remove(LINUX_ONLY, NEWER_MACOS_ONLY, POSIX_ONLY)
    _hide_proc()
    for name in POSIX_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # with None, importing it raises ImportError
    sys.platform = "win32"


def _import_first(*names: str) -> None:
    """Import what has branches of its own for the platform, so that those of Linux are taken; without uvloop."""
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # with None, importing it raises ImportError
    for name in (*STANDARD_MODULES, *names):
        importlib.import_module(name)


def _remove(*tables: Mapping[str, tuple[str, ...]]) -> None:
    for table in tables:
        for module, names in table.items():
            for name in names:
                with suppress(AttributeError):
                    delattr(sys.modules[module], name)


def _hide_proc() -> None:
    """Make /proc missing, and a call of a C library's function without a fallback visible."""
    import ctypes
    import os

    true_open, true_list = builtins.open, os.listdir

    def checked(path: Any) -> None:
        if isinstance(path, str) and path.startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", path)

    def open_checked(file: Any, *arguments: Any, **options: Any) -> Any:
        checked(file)
        return true_open(file, *arguments, **options)

    def list_checked(path: Any = ".") -> Any:
        checked(path)
        return true_list(path)

    def refuse(name: str | None, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError(f"a function of the C library {name} is not on every system")

    builtins.open = open_checked
    os.listdir = list_checked
    ctypes.CDLL = refuse  # type: ignore[assignment,misc]  # nothing may create one


def _use_disk_usage_of_windows() -> None:
    """`shutil` calls the system there, and `os.statvfs`, which Windows lacks, elsewhere."""
    import os
    import shutil

    true_statvfs = os.statvfs

    def disk_usage(path: str) -> tuple[int, int, int]:
        found = true_statvfs(path)
        sizes = found.f_blocks, found.f_blocks - found.f_bfree, found.f_bavail
        total, used, free = (size * found.f_frsize for size in sizes)
        return total, used, free

    shutil.disk_usage = disk_usage  # type: ignore[assignment]  # a plain tuple instead of a named one


def _use_proactor_interface() -> None:
    import asyncio
    import functools
    import socket
    from asyncio import protocols, selector_events

    def missing(*_: Any) -> NoReturn:
        raise NotImplementedError

    for name in ("add_reader", "add_writer"):
        setattr(selector_events.BaseSelectorEventLoop, name, missing)
    for name in ("add_signal_handler", "remove_signal_handler", "create_unix_connection"):
        setattr(asyncio.SelectorEventLoop, name, missing)
    transport: Any = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]  # private

    def read(self: Any) -> None:
        try:
            data = self._sock.recv(65_536)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fatal_error(error, "Fatal read error on socket transport")
            return
        if not data:
            self._read_ready__on_eof()
        elif isinstance(self._protocol, asyncio.BufferedProtocol):
            protocols._feed_data_to_buffered_proto(self._protocol, data)  # type: ignore[attr-defined]  # private
        else:
            self._protocol.data_received(data)

    true_pair = socket.socketpair
    socket.socketpair = functools.partial(
        true_pair, socket.AF_UNIX
    )  # the loop's own; without AF_UNIX it has no default
    transport._read_ready__get_buffer = read
    transport.writelines = lambda self, buffers: self.write(b"".join(buffers))


def main() -> None:
    kind, *rest = sys.argv[1:]
    {"darwin": imitate_macos, "win32": imitate_windows}[kind]()
    if rest[0] == "-c":
        sys.argv[1:] = rest[2:]
        exec(compile(rest[1], "<program>", "exec"), {"__name__": "__main__"})
        return
    sys.argv[1:] = rest
    from mansio.cli.main import main as mansio_main

    mansio_main()


if __name__ == "__main__":
    main()
