"""Bar charts, as lines of text for a terminal and as SVG for a file: a few numbers need no library to be drawn.

Always true: bars are to scale, the longest fills the width; a label is one line of printable characters.
"""

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
_ROW: Final = 22
_BARS_AT: Final = 260
_BARS_WIDTH: Final = 400
_COLOUR: Final = "#3b6ea8"
_LOUD_COLOUR: Final = "#c0392b"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its label, its length, what is written behind it, whether it is the one to look at."""

    label: str
    value: float
    note: str = ""
    is_highlighted: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars under a title. `mark` draws a line at this value, for instance at the mean."""

    title: str
    bars: Sequence[Bar]
    mark: float | None = None


def label_of(data: bytes | None) -> str:
    """A key for people: its text if it is printable, else its bytes in hexadecimal. One that is long lacks its middle:
    what keys of one kind differ in is mostly at their end."""
    if data is None:
        return "(no key)"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable():
        text = f"0x{data.hex()}" if data else "(empty)"
    if len(text) <= LABEL_LENGTH_MAX:
        return text
    end = LABEL_LENGTH_MAX // 2
    return f"{text[: LABEL_LENGTH_MAX - end - 1]}…{text[-end:]}"


def text_lines(chart: Chart, width: int = TEXT_WIDTH) -> list[str]:
    """The chart as lines; loud bars are marked by an exclamation mark, so that nothing depends on colour."""
    longest = max((bar.value for bar in chart.bars), default=0) or 1
    label_width = max((len(bar.label) for bar in chart.bars), default=0)
    lines = [chart.title]
    for bar in chart.bars:
        eighths = round(max(bar.value, 0) / longest * width * 8)
        drawn = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
        loud = "!" if bar.is_highlighted else " "
        lines.append(f"{loud} {bar.label.ljust(label_width)}  {drawn.ljust(width)}  {bar.note}".rstrip())
    return lines


def svg(charts: Sequence[Chart]) -> str:
    """All charts below each other, as one SVG document."""
    parts: list[str] = []
    top = 10
    for chart in charts:
        longest = max([bar.value for bar in chart.bars] + [chart.mark or 0], default=0) or 1
        parts.append(f'<text x="10" y="{top + 18}" class="title">{escape(chart.title)}</text>')
        top += 30
        texts = []
        for number, bar in enumerate(chart.bars):
            y = top + number * _ROW
            length = max(bar.value, 0) / longest * _BARS_WIDTH
            colour = _LOUD_COLOUR if bar.is_highlighted else _COLOUR
            texts.append(f'<text x="{_BARS_AT - 8}" y="{y + 15}" class="label">{escape(bar.label)}</text>')
            parts.append(
                f'<rect x="{_BARS_AT}" y="{y + 3}" width="{length:.1f}" height="15" fill="{colour}"/>'
            )
            texts.append(f'<text x="{_BARS_AT + length + 6:.1f}" y="{y + 15}">{escape(bar.note)}</text>')
        height = len(chart.bars) * _ROW
        if chart.mark is not None:
            x = _BARS_AT + chart.mark / longest * _BARS_WIDTH
            parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + height}" class="mark"/>')
        parts += texts  # over the line
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
