"""Bar charts of reports: as lines of text, and as a self-contained SVG document."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

LABEL_LENGTH_MAX: Final = 28
TEXT_WIDTH: Final = 40
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"

SVG_WIDTH: Final = 860
_ROW_HEIGHT: Final = 22
_BARS_LEFT: Final = 260
_BARS_WIDTH: Final = 400
_COLOUR: Final = "#3b6ea8"
_HIGHLIGHT_COLOUR: Final = "#c0392b"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart: label, length, text after the bar, and whether it is highlighted."""

    label: str
    value: float
    note: str = ""
    is_highlighted: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A bar chart with a title. `marker`: value at which a line is drawn, for example the mean."""

    title: str
    bars: Sequence[Bar]
    marker: float | None = None


def short_label(text: str) -> str:
    """Return a text that is shortened in the middle if it is long, because names of one kind usually differ at the
    end."""
    if len(text) <= LABEL_LENGTH_MAX:
        return text
    end = LABEL_LENGTH_MAX // 2
    return f"{text[: LABEL_LENGTH_MAX - end - 1]}…{text[-end:]}"


def render_text(chart: Chart, width: int = TEXT_WIDTH) -> list[str]:
    """Return the chart as lines of text, `width` characters for the longest bar. A highlighted bar has an exclamation
    mark.
    """
    longest = max((bar.value for bar in chart.bars), default=0) or 1
    label_width = max((len(bar.label) for bar in chart.bars), default=0)
    lines = [chart.title]
    for bar in chart.bars:
        eighths = round(max(bar.value, 0) / longest * width * 8)
        drawn = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
        loud = "!" if bar.is_highlighted else " "
        lines.append(f"{loud} {bar.label.ljust(label_width)}  {drawn.ljust(width)}  {bar.note}".rstrip())
    return lines


def render_svg(charts: Sequence[Chart]) -> str:
    """All charts as one SVG document."""
    parts: list[str] = []
    top = 10
    for chart in charts:
        longest = max([bar.value for bar in chart.bars] + [chart.marker or 0], default=0) or 1
        parts.append(f'<text x="10" y="{top + 18}" class="title">{escape(chart.title)}</text>')
        top += 30
        texts = []
        for number, bar in enumerate(chart.bars):
            y = top + number * _ROW_HEIGHT
            length = max(bar.value, 0) / longest * _BARS_WIDTH
            colour = _HIGHLIGHT_COLOUR if bar.is_highlighted else _COLOUR
            texts.append(f'<text x="{_BARS_LEFT - 8}" y="{y + 15}" class="label">{escape(bar.label)}</text>')
            parts.append(
                f'<rect x="{_BARS_LEFT}" y="{y + 3}" width="{length:.1f}" height="15" fill="{colour}"/>'
            )
            texts.append(f'<text x="{_BARS_LEFT + length + 6:.1f}" y="{y + 15}">{escape(bar.note)}</text>')
        height = len(chart.bars) * _ROW_HEIGHT
        if chart.marker is not None:
            x = _BARS_LEFT + chart.marker / longest * _BARS_WIDTH
            parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + height}" class="mark"/>')
        parts += texts  # above the line
        top += height + 20
    style = (
        "text{font:13px sans-serif;fill:#222;stroke:#fff;stroke-width:3px;paint-order:stroke}"
        ".title{font-size:15px;font-weight:bold}.label{text-anchor:end}"
        ".mark{stroke:#444;stroke-dasharray:4 3}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SVG_WIDTH}" height="{top}" viewBox="0 0 {SVG_WIDTH} {top}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
