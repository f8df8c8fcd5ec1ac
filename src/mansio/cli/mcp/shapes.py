"""What of a result goes into an answer. Pure functions.

Keys, values and headers of records, and the reasons that consumers give, are what clients wrote: an answer has them in
fields named `untrusted_data` only. Keys, values and the values of headers are shown only if `shows_values` is true.

Invariant: a text of a broker that names a key does not have it in an answer.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from mansio.cli.support.formatting import text_or_base64

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.client.admin.explanations import GroupExplanation, GroupFinding
    from mansio.client.admin.hot_partitions import HotPartition
    from mansio.client.admin.traces import RecordTrace
    from mansio.client.dead_letters import DeadLetter

UNTRUSTED: Final = "untrusted_data"


def without_empty(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without fields that say nothing: None, and empty texts, lists and objects."""
    return {name: value for name, value in row.items() if value is not None and value not in ("", [], {}, ())}


def bytes_fields(name: str, content: bytes | None) -> dict[str, Any]:
    """Return the fields of a key or value, as JSON output has them."""
    text, encoding = text_or_base64(content)
    return {name: text, f"{name}_encoding": encoding} if encoding else {name: text}


def dead_letter_row(dead_letter: DeadLetter, *, shows_values: bool) -> dict[str, Any]:
    """Return a dead letter: where it is, what the broker wrote, and what clients did."""
    from mansio.cli.admin.dlq import peek_row
    from mansio.client.dead_letters import original_headers

    row = peek_row(dead_letter)
    message, headers = dead_letter.message, original_headers(dead_letter.message)
    data: dict[str, Any] = {"reason": dead_letter.reason}
    if shows_values:
        data |= {**bytes_fields("key", message.key), **bytes_fields("value", message.value)}
        data["headers"] = [{"name": name, **bytes_fields("value", content)} for name, content in headers]
    else:
        data["header_names"] = [name for name, _ in headers]
    shown = {
        name: row[name] for name in ("position", "source", "group", "deliveries", "given_up", "consumer")
    }
    sizes = {"value_bytes": len(message.value or b"")}
    return {**without_empty(shown), **sizes, UNTRUSTED: without_empty(data)}


def explanation(found: GroupExplanation, *, shows_values: bool) -> dict[str, Any]:
    """Return what keeps a group from going on."""
    fields = without_empty(asdict(found))
    fields["summary"] = _summary(found)
    fields["findings"] = [_finding(each, shows_values=shows_values) for each in found.findings]
    if not found.more_findings:
        del fields["more_findings"]
    return fields


def _finding(found: GroupFinding, *, shows_values: bool) -> dict[str, Any]:
    fields = without_empty(asdict(found))
    fields.pop("key", None)
    fields["text"] = _without_key(found)
    if shows_values and found.key is not None:
        fields[UNTRUSTED] = bytes_fields("key", found.key)
    return fields


def _summary(found: GroupExplanation) -> str:
    first = found.findings[0] if found.findings else None
    if first is None or first.key is None:
        return found.summary
    if first.text in found.summary:
        return found.summary.replace(first.text, _without_key(first))
    return f"group {found.group_id} is {found.status}: {_without_key(first)}"


def _without_key(found: GroupFinding) -> str:
    """Return the text of a finding without its key; a text that has it in another form is left out whole."""
    from mansio.state.blockage.record_rules import of_key_text

    if found.key is None:
        return found.text
    shown = of_key_text(found.key)
    return found.text.replace(shown, "") if shown in found.text else found.cause


def timeline(found: RecordTrace) -> dict[str, Any]:
    """Return the history of a record, which has neither its key nor its value."""
    from mansio.cli.records.trace import json_of

    fields = json_of(found)
    events = [without_empty(each) for each in fields["events"]]
    for each in events:
        if not each["is_computed"]:
            del each["is_computed"]
        if not each["attempt"]:
            del each["attempt"]
    return {**without_empty(fields), "events": events}


def hot_partition(one: HotPartition, *, shows_values: bool) -> dict[str, Any]:
    """Return a hot partition. Without keys it has the shares of the most frequent ones."""
    from mansio.cli.admin.cluster_hot import partition_json

    fields = partition_json(one)
    keys = [
        {"share_min": each.share_min, "share_max": each.share_max}
        | ({UNTRUSTED: bytes_fields("key", each.key)} if shows_values else {})
        for each in one.keys
    ]
    remedies = [without_empty(each) for each in fields["remedies"]]
    return without_empty({**fields, "keys": keys, "remedies": remedies})


def error(failure: Exception) -> dict[str, Any]:
    """Return an error with its type and one line."""
    text = getattr(failure, "message", None) or str(failure)
    return {"error": {"type": type(failure).__name__, "message": " ".join(str(text).split())}}
