"""Names of attributes by OTEL_SEMCONV_STABILITY_OPT_IN, as the stability gate of OpenTelemetry defines its values."""

from __future__ import annotations

import pytest

from mansio.telemetry.conventions import (
    GROUP,
    OFFSET,
    OPERATION_NAME,
    OPERATION_TYPE,
    PARTITION,
    SYSTEM,
    NameSet,
    chosen_names,
)

CURRENT: dict[str, str | int | bool] = {
    SYSTEM: "kafka",
    OPERATION_NAME: "send",
    OPERATION_TYPE: "send",
    GROUP: "billing",
    PARTITION: "3",
    OFFSET: 17,
}
FORMER = {
    "messaging.system": "kafka",
    "messaging.operation": "publish",
    "messaging.kafka.consumer.group": "billing",
    "messaging.kafka.destination.partition": 3,
    "messaging.kafka.message.offset": 17,
}


@pytest.mark.parametrize(
    ("opt_in", "expected"),
    [
        (None, FORMER),
        ("", FORMER),
        ("http,database", FORMER),
        ("messaging", CURRENT),
        ("http, Messaging ", CURRENT),
        ("messaging/dup", {**FORMER, **CURRENT}),
        ("messaging/dup,messaging", {**FORMER, **CURRENT}),
    ],
)
def test_opt_in_chooses_the_names(opt_in: str | None, expected: dict[str, object]) -> None:
    environment = {} if opt_in is None else {"OTEL_SEMCONV_STABILITY_OPT_IN": opt_in}
    assert chosen_names(environment).apply(dict(CURRENT)) == expected


def test_types_of_other_operations_are_the_same_in_both() -> None:
    for kind in ("receive", "process", "settle"):
        assert NameSet.FORMER.apply({OPERATION_TYPE: kind}) == {"messaging.operation": kind}
