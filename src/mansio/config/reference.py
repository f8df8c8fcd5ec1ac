"""Generator of the reference of all settings: docs/reference/configuration.md and config.example.yaml.

`python -m mansio.config.reference` writes both files into the current directory's tree; a test compares them with the
definitions.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Final

from mansio.config import topic_config
from mansio.config.broker_config import DYNAMIC_SETTINGS
from mansio.config.config_entries import documentation
from mansio.config.settings import SPECIFICATIONS, Specification, default_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.config.config_def import ConfigKey

DOCUMENT_PATH: Final = "docs/reference/configuration.md"
EXAMPLE_PATH: Final = "config.example.yaml"
LINE_LENGTH: Final = 110

_INTRODUCTION: Final = """\
# Configuration

Generated from `mansio.config.settings` and `mansio.config.topic_config` by `python -m mansio.config.reference`.

## Sources and names

Later sources override earlier ones: the default; the file (`mansio serve --config FILE`, YAML, or TOML if its name ends
in `.toml`); the environment (`MANSIO_` and the name in capitals, such as `MANSIO_LISTENERS`); a flag. `mansio config
show` prints every value with its origin. An unknown name or an invalid value ends the start with one line that contains
the key, the problem and the origin.

A setting with the meaning of a broker setting of Kafka has Kafka's name with underscores. The file and `--set` accept
Kafka's name, too: `log.flush.interval.ms` is `log_flush_interval_ms`.

Bytes may be written as `64 MiB` (b, kB, MB, GB, KiB, MiB, GiB), times as `5 s` (ms, s, min, h, d); a plain number is
bytes or milliseconds. `config.example.yaml` contains every setting with its default.

## Changes while brokers run

Settings marked as dynamic, the defaults of topics among them, can be changed while brokers run, with `mansio cluster
settings` or any Kafka tool (KIP-226), under the names of DescribeConfigs: Kafka's, such as `log.retention.ms`, or
`mansio.<name>`. They are stored in the metadata, and survive restarts. Precedence: the value of one broker, the default
of all brokers, then the sources above. The others are read at the start, and a change is refused.
`follower.replication.throttled.rate`, as `kafka-reassign-partitions --throttle` sets it, replaces
`replica_throttle_bytes_per_second`; the throttles of leaders and of log directories are stored without effect.

## Settings of the broker
"""

_TOPICS: Final = """
## Settings of a topic

Kafka's names and values. They are set when a topic is created, changed with `mansio topic alter` or any Kafka tool,
and shown by `mansio topic describe`. All settings of Kafka 4.3 are accepted; those without effect are stored and
marked, and a warning is logged when one is set. `topic_defaults` in the broker's settings sets them for all topics
without a value of their own; in the environment it is JSON: `MANSIO_TOPIC_DEFAULTS='{"retention.ms": 86400000}'`.
Values are plain numbers, as in Kafka; an unknown setting or an invalid value is refused with `INVALID_CONFIG` and
the reason. Names that begin with `mansio.` are extensions; for retention see
[holds](../how-to/pipelines.md#retention-holds).
"""

_NOT_OFFERED: Final = """
## Topic settings of earlier versions of Kafka that are refused

Kafka 4 refuses them as well.
"""


def render_document() -> str:
    """Return the content of docs/reference/configuration.md."""
    rows = [
        (
            f"`{name}`",
            _default(name) or "(empty)",
            _range(name),
            _cell(specification.meaning + _effect(specification)) + _dynamic(name),
        )
        for name, specification in SPECIFICATIONS.items()
    ]
    topic_rows = [
        (
            f"`{row.name}`",
            f"`{row.default}`" if row.default else _no_default(row.name),
            row.kind.name.lower(),
            _cell(row.meaning + _effect(row)),
        )
        for row in topic_config.SETTINGS.values()
    ]
    refused = [(f"`{name}`", _cell(reason)) for name, reason in topic_config.UNSUPPORTED_SETTINGS.items()]
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


def _dynamic(name: str) -> str:
    return " **Dynamic.**" if name in DYNAMIC_SETTINGS or name == "topic_defaults" else ""


def _no_default(name: str) -> str:
    return "majority" if name == "min.insync.replicas" else "(empty)"


def _effect(row: ConfigKey | Specification) -> str:
    if row.no_effect:
        return f" **Without effect**: {row.no_effect}."
    if isinstance(row, Specification) or not row.effect:
        return ""
    return f" **{row.effect[0].upper()}{row.effect[1:]}.**"


def render_example() -> str:
    """Return the content of config.example.yaml: every setting with its default and its meaning."""
    lines = [
        "# Every setting of a Mansio broker with its default. Keep the ones you change and delete the others.",
        "# See docs/reference/configuration.md.",
    ]
    for name, specification in SPECIFICATIONS.items():
        allowed = _range(name)
        comment = documentation(specification) + (f" ({allowed})" if allowed else "")
        lines += ["", *textwrap.wrap(comment, LINE_LENGTH, initial_indent="# ", subsequent_indent="# ")]
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
    if specification.form or specification.is_address:
        return specification.form or "host:port"
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
    """Write docs/reference/configuration.md and config.example.yaml."""
    for path, text in ((DOCUMENT_PATH, render_document()), (EXAMPLE_PATH, render_example())):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
