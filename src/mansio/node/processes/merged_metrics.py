"""Metrics of several brokers in one text (Prometheus text format 0.0.4): each sample gets the label `process`.

Invariant: the description of a metric comes once, before its samples, whichever brokers have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LABEL: Final = "process"


class _Family:
    """Comment lines and samples of one metric."""

    __slots__ = ("comments", "samples")

    def __init__(self) -> None:
        self.comments: dict[str, str] = {}
        self.samples: list[str] = []


def merge_metrics(texts: Mapping[int, str]) -> str:
    """Return the metrics of the processes, by node id."""
    families: dict[str, _Family] = {}
    for node_id, text in texts.items():
        family = _Family()
        for line in text.splitlines():
            if line.startswith("# "):
                kind, name, *_ = [*line[2:].split(" ", 2), ""]
                family = families.setdefault(name, _Family())
                family.comments.setdefault(kind, line)
            elif line and not line.startswith("#"):
                family.samples.append(_labelled(line, node_id))
    return "".join(
        f"{line}\n" for each in families.values() for line in (*each.comments.values(), *each.samples)
    )


def family(name: str, kind: str, meaning: str, samples: Iterable[tuple[str, float]]) -> str:
    """Return the text of a metric of the supervisor. `samples`: pairs of labels in braces, or nothing, and value."""
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    return "".join(
        f"{line}\n" for line in (*lines, *(f"{name}{labels} {value:g}" for labels, value in samples))
    )


def process_label(node_id: int) -> str:
    """Return the label of a process, in braces."""
    return f'{{{LABEL}="{node_id}"}}'


def _labelled(sample: str, node_id: int) -> str:
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        return f'{sample[: brace + 1]}{LABEL}="{node_id}",{sample[brace + 1 :]}'
    return f"{sample[:space]}{process_label(node_id)}{sample[space:]}"
