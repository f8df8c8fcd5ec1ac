"""Application of Celery for tests, and worker processes of it.

Tasks write a line to a file of the test when they run, so that a test sees how often each has run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import celery
import kombu.pools
from celery.exceptions import Reject

import mansio.celery  # noqa: F401  # the scheme mansio://
from support.machine import scaled
from support.paths import ROOT
from support.process import inherited
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

BROKER = "SHOP_BROKER"
PLACE = "SHOP_PLACE"
OPTIONS = "SHOP_LEASE_S"


def new_app(broker: str, place: str, lease_s: float | None = None) -> celery.Celery:
    """The application of one test, with results and lines in `place`. `broker`: host and port, or a URL."""
    results = Path(place, "results")
    results.mkdir(exist_ok=True)
    url = broker if "://" in broker else f"mansio://{broker}"
    made = celery.Celery("support.celery_shop", broker=url, backend=f"file://{results}")
    made.conf.update(
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        task_routes={"invoice": {"queue": "invoices"}},
        worker_prefetch_multiplier=1,
        broker_transport_options={"visibility_timeout": lease_s} if lease_s else {},
        result_expires=None,
    )
    return made


def close_app(app: celery.Celery) -> None:
    """Close an application and its connections. Applications with one URL share pools, and a closed pool stays in
    kombu's table: an application of a later test, whose broker has the same port, would get it."""
    app.close()
    kombu.pools.reset()


if os.environ.get(BROKER):
    lease = os.environ.get(OPTIONS)
    app = new_app(os.environ[BROKER], os.environ[PLACE], float(lease) if lease else None)

    def note(line: str) -> None:
        with Path(os.environ[PLACE], "lines").open("a") as lines:
            lines.write(f"{line}\n")

    @app.task(name="add")
    def add(one: int, other: int) -> int:
        note(f"add {one} {other}")
        return one + other

    @app.task(name="invoice")
    def invoice(number: int) -> None:
        note(f"invoice {number}")

    @app.task(name="late", acks_late=True)
    def late(number: int, seconds: float) -> None:
        note(f"begin {number} {os.environ['SHOP_NAME']}")
        time.sleep(seconds)
        note(f"end {number}")

    @app.task(name="reject", acks_late=True, bind=True)
    def reject(task: Any, number: int, requeue: bool) -> None:
        note(f"reject {number} {task.request.delivery_info['redelivered']}")
        if not requeue or not task.request.delivery_info["redelivered"]:
            raise Reject("not now", requeue=requeue)

    @app.task(name="crash", acks_late=True, reject_on_worker_lost=True, bind=True)
    def crash(task: Any, number: int) -> None:
        note(f"crash {number}")
        if not task.request.delivery_info["redelivered"]:
            os.kill(os.getpid(), signal.SIGKILL)

    @app.task(name="again", bind=True)
    def again(task: Any, number: int) -> None:
        was_delayed = getattr(task.request, "mansio_eta", None) is not None
        note(f"again {number} {task.request.retries} {was_delayed} {task.request.eta}")
        if not task.request.retries:
            raise task.retry(countdown=3600)


class Worker:
    """A worker process."""

    def __init__(
        self, broker: str, place: Path, name: str, *arguments: str, lease_s: float | None = None
    ) -> None:
        self.log = place / f"{name}.log"
        environment = {
            **inherited(),
            "PYTHONPATH": str(ROOT / "tests"),
            BROKER: broker,
            PLACE: str(place),
            "SHOP_NAME": name,
            **({OPTIONS: str(lease_s)} if lease_s else {}),
        }
        command = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "support.celery_shop",
            "worker",
            "-n",
            f"{name}@test",
        ]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "-l", "info", *arguments],
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until the worker consumes."""
        wait_until(
            lambda: " ready." in self.log.read_text() or self.process.poll() is not None, 60, "worker ready"
        )
        assert self.process.poll() is None, self.log.read_text()

    def kill(self) -> None:
        """Kill the worker and its pool, as a loss of the machine would."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Shut the worker down as an operator would; kill it if that takes too long."""
        self.process.terminate()
        try:
            self.process.wait(scaled(30))
        finally:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def lines(place: Path) -> list[str]:
    """What the tasks have written so far."""
    path = place / "lines"
    return path.read_text().splitlines() if path.exists() else []


def counts(place: Path, beginning: str) -> Mapping[str, int]:
    """How often each line with this beginning was written."""
    found: dict[str, int] = {}
    for line in lines(place):
        if line.startswith(beginning):
            found[line] = found.get(line, 0) + 1
    return found
