"""Values of plain JSON, encoded with a schema of the registry before they are published.

The schema comes from the broker that leads the registry's topic, with the rights of the caller. The schema worker of
this broker encodes, because a schema of a client may make that slow.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from mansio.broker.coordinator.registry.schema_checks import malformed_record
from mansio.errors import InvalidRecord, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.publish_records import RecordToPublish
    from mansio.client import Client

LATEST: Final = "latest"
JOB_BYTES_MAX: Final = 1 << 20
"""Bytes of values that the worker gets at once, one value at least."""


async def encode_values(
    services: BrokerServices, client: Client, topic: str, schema: str, records: Sequence[RecordToPublish]
) -> Sequence[RecordToPublish]:
    """Return records whose values, which are plain JSON, are encoded with a schema, after a frame with its id. A value
    that is null stays null. `schema`: an id, or "latest" for that of the subject `TOPIC-value`. `client`: acts for the
    caller.

    Raises `InvalidRecord`, which names the record and the path in its value, `InvalidRequest`, `SchemaRegistryRefusal`,
    `ClusterAuthorizationFailed`."""
    resolved = await _resolved(client, topic, schema)
    found = list(records)
    for part in _parts(records):
        values = [_parsed(records[number], number) for number in part]
        try:
            encoded = await services.schemas.encode(resolved, values)
        except InvalidRecord as error:
            ((position, reason),) = error.record_errors
            raise malformed_record("record", part[position], reason or "") from error
        for number, value in zip(part, encoded, strict=True):
            found[number] = found[number]._replace(value=value)
    return found


async def _resolved(client: Client, topic: str, schema: str) -> dict[str, Any]:
    request = client.admin.schemas.request
    if schema == LATEST:
        found = await request("resolved", f"{topic}-value", {})
    elif schema.isascii() and schema.isdigit() and len(schema) <= 10:
        found = await request("resolved", None, {"id": int(schema)})
    else:
        raise InvalidRequest(f"schema: {schema[:40]!r} is neither an id nor {LATEST!r}")
    resolved: dict[str, Any] = found
    return resolved


def _parts(records: Sequence[RecordToPublish]) -> Iterator[list[int]]:
    """Yield the numbers of the records that have a value, in parts for the worker."""
    part: list[int] = []
    size = 0
    for number, record in enumerate(records):
        if record.value is None:
            continue
        if part and size + len(record.value) > JOB_BYTES_MAX:
            yield part
            part, size = [], 0
        part.append(number)
        size += len(record.value)
    if part:
        yield part


def _parsed(record: RecordToPublish, number: int) -> Any:
    try:
        return json.loads(record.value or b"", parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise malformed_record("record", number, f"the value is not JSON: {error}") from error


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")
