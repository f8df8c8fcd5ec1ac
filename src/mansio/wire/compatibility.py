"""docs/COMPATIBILITY.md, made from the one table: what is offered, in which versions, and what is left out and why.

Always true: `render` is a pure function of `versions`; the file in docs/ is its output, and a test compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.wire.versions import OFFERED, SKIPPED

if TYPE_CHECKING:
    from mansio.wire.versions import Api

_INTRODUCTION: Final = """\
# Compatibility with Kafka

Mansio speaks Kafka's protocol; a client finds out with ApiVersions what this broker offers. Generated from
the table in `src/mansio/wire/versions.py` by `make format`: a version stands here only when it is implemented
and tested.

Only record batch format 2 (Kafka 0.11 and newer) is accepted and stored; it is stored as it was sent.

## Offered

| API | key | versions | remarks |
|---|---|---|---|
"""

_NOT_OFFERED: Final = """
## Not offered

| API | why |
|---|---|
"""


def render() -> str:
    """The whole document, in Markdown."""
    offered = "".join(map(_row, OFFERED.values()))
    skipped = "".join(f"| {name} | {reason} |\n" for name, reason in SKIPPED.items())
    return _INTRODUCTION + offered + _NOT_OFFERED + skipped


def _row(api: Api) -> str:
    versions = str(api.lowest) if api.lowest == api.highest else f"{api.lowest}-{api.highest}"
    newer = f"Newer versions are not offered: {api.skipped}" if api.skipped else ""
    remarks = " ".join(filter(None, (api.note, newer)))
    return f"| {_name(api)} | {int(api.key)} | {versions} | {remarks} |\n"


def _name(api: Api) -> str:
    """Kafka's own spelling: OFFSET_FOR_LEADER_EPOCH -> OffsetForLeaderEpoch."""
    return "".join(word.capitalize() for word in api.key.name.split("_"))
