"""The outcome of rows as text for a terminal, and as a table in Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.rows import Row

HEADER = (
    "| row | beside | ratio (lowest to highest) | sharmill | beside it | target |\n"
    "|---|---|---|---|---|---|"
)  # fmt: skip


def markdown_line(row: Row, found: dict[str, Any]) -> str:
    """Return the row's line of the table."""
    what = f"**{row.name}**: {row.what}"
    if "error" in found:
        return f"| {what} | {found['error']} | | | | |"
    theirs = _times(found["baseline"]) if "baseline" in found else ""
    ours = ", ".join([_times(found["ours"]), *_figures(found)])
    return f"| {what} | {row.baseline} | {_ratio(found)} | {ours} | {theirs} | {'; '.join(_targets(found))} |"


def describe(row: Row, found: dict[str, Any]) -> str:
    """Return the lines of a row for a terminal."""
    return "\n".join(_lines(row, found))


def _lines(row: Row, found: dict[str, Any]) -> Iterator[str]:
    yield f"{row.name}: {row.what}"
    if "error" in found:
        yield f"  {found['error']}"
        return
    if "baseline" in found:
        sense = "of its time" if row.inverse else "times as fast"
        yield f"  {_ratio(found)} {sense} beside {row.baseline}, by {found['by']} time"
    for target in _targets(found):
        yield f"  target: {target}"
    yield f"  sharmill: {', '.join([_times(found['ours']), *_figures(found)])}"
    if "baseline" in found:
        yield f"  beside:   {_times(found['baseline'])}"


def _ratio(found: dict[str, Any]) -> str:
    if "ratio" not in found:
        return ""
    lowest, highest = found["ratios"][0], found["ratios"][-1]
    return f"{found['ratio']:.2f} ({lowest:.2f} to {highest:.2f})"


def _times(way: dict[str, Any]) -> str:
    return f"{way['processor']:.3f} s of processors ({way['system']:.3f} system), {way['wall']:.3f} s wall"


def _figures(found: dict[str, Any]) -> list[str]:
    ours = found["ours"]
    work = f"{found['amount']:,.4g} {found['unit']}, {found['amount'] / ours[found['by']]:,.4g} a second"
    return [work, *(f"{name} {value:,.4g}" for name, value in ours["figures"].items())]


def _targets(found: dict[str, Any]) -> list[str]:
    return [
        f"{name} {one['target']}: {'met' if one['met'] else 'not met'}"
        + ("" if name == "ratio" else f" ({one['value']:.3g})")
        for name, one in found["targets"].items()
    ]
