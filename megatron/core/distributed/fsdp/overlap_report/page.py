"""The page of a report: one file of HTML that needs no network."""

from __future__ import annotations

import html
import json
from typing import Any

from megatron.core.distributed.fsdp.overlap_report.page_script import SCRIPT
from megatron.core.distributed.fsdp.overlap_report.page_style import STYLE
from megatron.core.distributed.fsdp.overlap_report.picture import COLORS, MEMORY_COLORS

_MEANINGS = (
    ("compute", "Time in which kernels of the unit ran in this direction, other than communication of the engine."),
    (
        "gather, reduce",
        "Time in which the unit's own all-gathers and gradient reductions ran, hidden behind compute or not.",
    ),
    (
        "wait",
        "Time before the unit's compute in which nothing computed: exposed, host and between together. It counts for the unit that "
        "waited, whatever it waited for.",
    ),
    ("exposed", "The part of wait in which communication ran."),
    ("host", "The part in which nothing ran, since the host had not launched the unit's next kernel yet."),
    ("between", "The rest: launched, but not begun; the device's time between kernels, and waits for other ranks."),
    ("received, GB/s", "Bytes that other ranks sent to this one, and that by the time of gather or reduce."),
    (
        "outside of units",
        "Work in no unit's forward: the loss, clipping, an optimizer that updates all units at once.",
    ),
)


def page_of(report: dict[str, Any]) -> str:
    """Return the page of a report (``make_report``)."""
    data = {**report, "kind": "report", "colors": COLORS, "memory_colors": MEMORY_COLORS}
    captured = "as a CUDA graph" if report["is_captured"] else "eager"
    facts = f"Iteration {report['iteration']}, rank {report['rank']} of {report['num_ranks']}, {captured}, {report['device']}, torch {report['torch']}."
    if report["usual_ms"] is not None:
        facts += f" The steps before took {report['usual_ms']:.1f} ms (median)."
    body = f"""
<p class="soft">Overlap report</p><h1>{_text(report["headline"])}</h1><p class="soft">{_text(facts)}</p>
<section><h2>The whole step</h2><div class="bar" id="bar"></div><div class="keys" id="barkeys"></div></section>
<section><h2>Time line</h2>
<div class="tools"><button id="in">zoom in</button><button id="out">zoom out</button><button id="left" aria-label="earlier">←</button>
<button id="right" aria-label="later">→</button><button id="all">whole step</button>
<span class="soft">drag to move, Ctrl and wheel or double click to zoom</span></div>
<canvas id="line"></canvas><div class="keys" id="linekeys"></div></section>
<section><h2>Units</h2><p class="soft">Click a column to sort by it.</p>
<div class="tools"><input id="filter" placeholder="show units with ..." aria-label="show units with"></div><div id="units"></div></section>
<section><h2>Memory</h2><p class="soft">{_text(_memory_caption(report))}</p>
<div id="memory"></div><div class="keys" id="memorykeys"></div></section>
<section><h2>Ranks</h2><p class="soft">{_text(_ranks_caption(report))}</p><div id="ranks"></div></section>
<section><h2>What it means</h2>{"".join(f"<p>{_text(note)}</p>" for note in report["notes"])}<dl>{_meanings()}</dl></section>"""
    return _page(f"Overlap of iteration {report['iteration']}", body, data)


def comparison_page(comparison: dict[str, Any]) -> str:
    """Return the page of a comparison (``compare_reports``)."""
    body = f"""
<p class="soft">Two overlap reports</p><h1>{_text(comparison["headline"])}</h1>
<section><dl><dt>A</dt><dd>{_text(comparison["a"])}</dd><dt>B</dt><dd>{_text(comparison["b"])}</dd></dl></section>
<section><h2>Units</h2><p class="soft">What changed from A to B; green is less time. Click a column to sort by it.</p>
<div class="tools"><input id="filter" placeholder="show units with ..." aria-label="show units with"></div><div id="units"></div></section>
<section><h2>What it means</h2><dl>{_meanings()}</dl></section>"""
    return _page("Two overlap reports", body, {**comparison, "kind": "comparison"})


def _page(title: str, body: str, data: dict[str, Any]) -> str:
    # No text of the data ends the script early.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{_text(title)}</title><style>{STYLE}</style></head>
<body><main>{body}
</main><div id="tip"></div>
<script type="application/json" id="data">{embedded}</script>
<script>{SCRIPT}</script></body></html>
"""


def _memory_caption(report: dict[str, Any]) -> str:
    if not report["memory"]:
        return "No memory was recorded."
    peak = sum(report["memory"]["peak"].values())
    size = f"{peak / 2**30:.2f} GiB" if peak >= 2**30 else f"{peak / 2**20:.1f} MiB"
    return f"By kind, over the host's time in iteration {report['memory_of']}: {size} at the peak, and each kind's part of it below."


def _ranks_caption(report: dict[str, Any]) -> str:
    ranks = report["ranks"]
    if len(ranks) == 1:
        return "There is one rank."
    slow, fast = (pick(range(len(ranks)), key=lambda at: ranks[at]["compute"]) for pick in (max, min))
    waits, goes = (pick(range(len(ranks)), key=lambda at: ranks[at]["wait"]) for pick in (max, min))
    return (
        f"Compute takes from {ranks[fast]['compute']:.2f} ms (rank {fast}) to {ranks[slow]['compute']:.2f} ms (rank {slow}); ranks wait "
        f"from {ranks[goes]['wait']:.2f} ms (rank {goes}) to {ranks[waits]['wait']:.2f} ms (rank {waits})."
    )


def _meanings() -> str:
    return "".join(f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in _MEANINGS)


def _text(value: str) -> str:
    return html.escape(value)
