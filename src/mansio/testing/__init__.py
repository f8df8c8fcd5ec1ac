"""Test broker, pytest fixtures, and the simulated ports of Mansio's own tests.

>>> with mansio.testing.TestBroker() as broker:
...     broker.client().publish("orders", b"one")
...     broker.clock.advance(minutes=15)

Public are `TestBroker` with its `clock` and `faults`, and the fixtures of `pytest_plugin`. Names are imported on first
use, because pytest imports the plugin in every run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mansio.testing.broker import BrokerClock, TestBroker
    from mansio.testing.broker_faults import BrokerFaults

__all__ = ["BrokerClock", "BrokerFaults", "TestBroker"]

_MODULES = {
    "BrokerClock": "mansio.testing.broker",
    "BrokerFaults": "mansio.testing.broker_faults",
    "TestBroker": "mansio.testing.broker",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
