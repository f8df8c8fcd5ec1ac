"""Transport of kombu, so that Celery uses Mansio as its broker (docs/how-to/from-celery.md).

>>> import mansio.celery    # makes the scheme mansio:// known
>>> app = celery.Celery("shop", broker="mansio://127.0.0.1:9092")

Programs that cannot import it set `broker_transport = "mansio.celery:Transport"`. `kombu_transport` connects,
`channel` maps the calls of kombu to topics and share groups, `queue_reader` and `exchange_reader` read them on the
thread of `client_thread`, `inbox` hands deliveries to the thread of the worker, `queue_admin` creates, purges and
searches queues, and `task_records` converts between messages and records.

Invariants:
* A queue is one topic and one share group of the same name; a message is one record, in the form that kombu gives it.
* A message with an eta is delayed by the broker. No worker holds it.
* A queue of a single process receives every message that is published after its binding returns.
* An unacknowledged message is leased, and its lease is extended while its worker runs.
"""

from __future__ import annotations

from mansio.host.extras import require_extra

require_extra("celery")

from kombu.transport import TRANSPORT_ALIASES  # noqa: E402  # a missing kombu is one line with the command that installs it

from mansio.celery.kombu_transport import Transport  # noqa: E402

__all__ = ["Transport"]

TRANSPORT_ALIASES.setdefault("mansio", "mansio.celery.kombu_transport:Transport")

transport = Transport
"""`mansio.celery.Transport://` in lower case, which is how kombu before 5.7 reads the scheme of an address."""
