"""Blocking client: the API of the asyncio client for programs without an event loop.

>>> with mansio.blocking.connect("127.0.0.1:9092") as client:
...     client.publish("greetings", b"hello", key=b"world")
...     for message in client.consume("greetings", max_records=1):
...         print(message.value)

Every client runs one event loop in a thread of its own. Handlers and callbacks are called on other threads than the
program's; those of `consume` must not call the client. Objects may be shared between threads. Type checkers read
`blocking.pyi`, which is generated from the asyncio classes.
"""

from mansio.client.blocking import (
    AclAdmin,
    Admin,
    Client,
    ClusterAdmin,
    Consumer,
    DelayAdmin,
    Delivery,
    ProcessHandler,
    Producer,
    QuotaAdmin,
    ScheduleAdmin,
    SchemaAdmin,
    ShareAdmin,
    TokenAdmin,
    TraceAdmin,
    Transaction,
    TransactionAdmin,
    UserAdmin,
    connect,
)
from mansio.client.share.receiver_blocking import Handler, Leased, Receiver
from mansio.net.blocking import LoopUnavailable

__all__ = [
    "AclAdmin",
    "Admin",
    "Client",
    "ClusterAdmin",
    "Consumer",
    "DelayAdmin",
    "Delivery",
    "Handler",
    "Leased",
    "LoopUnavailable",
    "ProcessHandler",
    "Producer",
    "QuotaAdmin",
    "Receiver",
    "ScheduleAdmin",
    "SchemaAdmin",
    "ShareAdmin",
    "TokenAdmin",
    "TraceAdmin",
    "Transaction",
    "TransactionAdmin",
    "UserAdmin",
    "connect",
]
