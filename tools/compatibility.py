"""docs/COMPATIBILITY.md, made from the table in `mansio.wire.versions`."""

from __future__ import annotations

from mansio.wire.versions import OFFERED, SKIPPED

INTRODUCTION = """\
# Compatibility with Kafka

Mansio speaks Kafka's protocol; a client finds out with ApiVersions what this broker offers. Generated from
the table in `src/mansio/wire/versions.py` by `make format`: a version stands here only when it is implemented
and tested.

Only record batch format 2 (Kafka 0.11 and newer) is accepted and stored; it is stored as it was sent.

## Offered
"""


def _name(words: str) -> str:
    return "".join(word.capitalize() for word in words.split("_"))


def document() -> str:
    """The whole file."""
    lines = [INTRODUCTION, "| API | key | versions | remarks |", "|---|---|---|---|"]
    for api in OFFERED.values():
        newer = f"Newer versions are not offered: {api.skipped}" if api.skipped else ""
        remarks = " ".join(part for part in (api.note, newer) if part)
        versions = str(api.lowest) if api.lowest == api.highest else f"{api.lowest}-{api.highest}"
        lines.append(f"| {_name(api.key.name)} | {int(api.key)} | {versions} | {remarks} |")
    lines += ["", "## Not offered", "", "| API | why |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in SKIPPED.items()]
    return "\n".join(lines) + "\n"
