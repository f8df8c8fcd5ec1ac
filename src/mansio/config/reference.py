"""The reference of all settings, written from the tables: docs/CONFIGURATION.md and config.example.yaml.

`python -m mansio.config.reference` writes both files into the current directory's tree; a test holds them to the
tables, so that the documentation cannot lag behind.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Final

from mansio.config import topic_config
from mansio.config.settings import SPECIFICATIONS, default_of

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCUMENT: Final = "docs/CONFIGURATION.md"
EXAMPLE: Final = "config.example.yaml"
COLUMNS: Final = 110

_INTRODUCTION: Final = """\
# Configuration

Written from the tables in `mansio.config.settings` and `mansio.config.topic_config` by `python -m
mansio.config.reference`.

## Where a value comes from

Later ones win: the default; the file (`mansio serve --config FILE`, YAML, or TOML if its name ends in `.toml`); the
environment (`MANSIO_` and the name in capitals, such as `MANSIO_LISTENERS`); a flag. `mansio config show` prints
every value with its origin. A name nobody knows, or a value that cannot be, ends the start with one line that says
which key, what is wrong and where it stands.

Bytes may be written as `64 MiB` (b, kB, MB, GB, KiB, MiB, GiB), times as `5 s` (ms, s, min, h, d); a bare number is
bytes or milliseconds. `config.example.yaml` shows every setting with its default.

## Settings of the broker
"""

_TOPICS: Final = """
## Settings of a topic

Kafka's own names and values, set when a topic is created, changed with `mansio topic alter` or any Kafka tool, and
shown by `mansio topic describe`. `topic_defaults` in the broker's settings sets them for all topics that do not; in the
environment that is JSON: `MANSIO_TOPIC_DEFAULTS='{"retention.ms": 86400000}'`. Values are plain numbers here, as
everywhere in Kafka; an unknown setting or a value that cannot be is refused with `INVALID_CONFIG` and the reason.
Names that begin with `mansio.` are our own: what pipelines may hold back is told in [PIPELINES.md](PIPELINES.md).
"""

_NOT_OFFERED: Final = """
## Topic settings of Kafka that are refused

A setting that would do nothing is refused rather than accepted in silence.
"""


def document() -> str:
    """The whole of docs/CONFIGURATION.md."""
    rows = [
        (f"`{name}`", _default(name) or "(empty)", _range(name), _cell(specification.meaning))
        for name, specification in SPECIFICATIONS.items()
    ]
    topic_rows = [
        (
            f"`{row.name}`",
            f"`{row.default}`" if row.default else "majority",
            row.kind.name.lower(),
            _cell(row.meaning + (f" **{row.effect[0].upper()}{row.effect[1:]}.**" if row.effect else "")),
        )
        for row in topic_config.SETTINGS.values()
    ]
    refused = [(f"`{name}`", _cell(reason)) for name, reason in topic_config.NOT_OFFERED.items()]
    return "\n".join(
        [
            _INTRODUCTION,
            _table(("name", "default", "allowed", "meaning"), rows),
            _TOPICS,
            _table(("name", "default", "type", "meaning"), topic_rows),
            _NOT_OFFERED,
            _table(("name", "why"), refused),
            "",
        ]
    )


def example() -> str:
    """The whole of config.example.yaml: every setting at its default, with its meaning."""
    lines = [
        "# Every setting of a Mansio broker, at its default. Keep what you change and delete the rest.",
        "# docs/CONFIGURATION.md tells more.",
    ]
    for name, specification in SPECIFICATIONS.items():
        allowed = _range(name)
        comment = specification.meaning + (f" ({allowed})" if allowed else "")
        lines += ["", *textwrap.wrap(comment, COLUMNS, initial_indent="# ", subsequent_indent="# ")]
        if name == "topic_defaults":
            lines.append("topic_defaults: {}")
            lines += [
                f"#  {row.name}: {row.default}" for row in topic_config.SETTINGS.values() if row.default
            ]
        else:
            lines.append(f"{name}: {_yaml(default_of(name))}")
    return "\n".join(lines) + "\n"


def _default(name: str) -> str:
    value = default_of(name)
    if name == "topic_defaults" or value == "":
        return ""
    readable = _readable(value, SPECIFICATIONS[name].unit)
    return f"`{_yaml(value).strip(chr(34))}`" + (f" ({readable})" if readable else "")


def _readable(value: Any, unit: str) -> str:
    steps = {
        "bytes": ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")),
        "ms": ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s")),
    }
    for size, word in steps.get(unit, ()):
        if value and value % size == 0:
            return f"{value // size} {word}"
    return ""


def _range(name: str) -> str:
    specification = SPECIFICATIONS[name]
    if specification.choices:
        return ", ".join(specification.choices)
    if specification.address:
        return "host:port"
    if isinstance(default_of(name), bool):
        return "true, false"
    if specification.minimum is None:
        return ""
    unit = f" {specification.unit}" if specification.unit else ""
    return f"{specification.minimum} to {specification.maximum}{unit}"


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Write both files."""
    for path, text in ((DOCUMENT, document()), (EXAMPLE, example())):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
