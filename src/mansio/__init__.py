"""Mansio: a durable, distributed message queue that speaks Kafka's protocol, with individual acknowledgements.

>>> async with mansio.connect("127.0.0.1:9092") as client:      # asyncio
...     await client.publish("orders", b"one", key=b"ada")
>>> with mansio.blocking.connect("127.0.0.1:9092") as client:   # the same API, blocking
...     client.publish("orders", b"two", key=b"ada")
>>> with mansio.Broker("data") as broker:                       # a complete broker in this process
...     print(broker.address)

Names are imported on first use, so that `import mansio` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mansio.version import __version__

if TYPE_CHECKING:
    from mansio import errors
    from mansio.client import (
        Client,
        Message,
        RecordMetadata,
        TopicPartition,
        blocking,
        connect,
    )
    from mansio.errors import MansioError
    from mansio.node.embedded import EmbeddedBroker as Broker

__all__ = [
    "Broker",
    "Client",
    "MansioError",
    "Message",
    "RecordMetadata",
    "TopicPartition",
    "__version__",
    "blocking",
    "connect",
    "errors",
]

_LAZY = {
    "Broker": ("mansio.node.embedded", "EmbeddedBroker"),
    "Client": ("mansio.client", "Client"),
    "MansioError": ("mansio.errors", "MansioError"),
    "Message": ("mansio.client", "Message"),
    "RecordMetadata": ("mansio.client", "RecordMetadata"),
    "TopicPartition": ("mansio.client", "TopicPartition"),
    "blocking": ("mansio.client.blocking", ""),
    "connect": ("mansio.client", "connect"),
    "errors": ("mansio.errors", ""),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'mansio' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    loaded = importlib.import_module(module)
    value = getattr(loaded, attribute) if attribute else loaded
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
