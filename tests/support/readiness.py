"""Readiness of a broker without the reason `event_loop_stalled`, which a busy machine causes for half a minute when a
process got no processor for a second. Tests of that reason do not use it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from support.machine import scaled

DEADLINE_S = 15.0
READY, NOT_READY = 200, 503


def readiness(http_url: str) -> dict[str, Any]:
    """The answer's value, with its `status`."""
    try:
        with urllib.request.urlopen(f"{http_url}/health/ready", timeout=scaled(DEADLINE_S)) as answer:
            status, shown = answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        status, shown = error.code, json.load(error)
    assert (status, not shown["reasons"]) in ((READY, True), (NOT_READY, False)), (status, shown)
    shown["reasons"] = [reason for reason in shown["reasons"] if reason["reason"] != "event_loop_stalled"]
    shown["ready"] = not shown["reasons"]
    shown["status"] = READY if shown["ready"] else NOT_READY
    return dict(shown)
