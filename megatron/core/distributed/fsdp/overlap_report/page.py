"""The page of a report: one file of HTML that needs no network, with the script and the style that lie next to this file."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from megatron.core.distributed.fsdp.overlap_report.picture import COLORS, MEMORY_COLORS


def page_of(report: dict[str, Any]) -> str:
    """Return the page of a report (``make_report``)."""
    captured = "as a CUDA graph" if report["is_captured"] else "eager"
    facts = f"Iteration {report['iteration']}, rank {report['rank']} of {report['num_ranks']}, {captured}, {report['device']}, torch {report['torch']}."
    if report["usual_ms"] is not None:
        facts += f" The steps before took {report['usual_ms']:.1f} ms (median)."
    return _page(
        {**report, "kind": "report", "colors": COLORS, "memory_colors": MEMORY_COLORS},
        title=f"Overlap of iteration {report['iteration']}",
        headline=report["headline"],
        facts=facts,
        memory=_memory_caption(report),
        ranks=_ranks_caption(report),
    )


def comparison_page(comparison: dict[str, Any]) -> str:
    """Return the page of a comparison (``compare_reports``)."""
    texts = {name: comparison[name] for name in ("headline", "a", "b")}
    return _page({**comparison, "kind": "comparison"}, title="Two overlap reports", **texts)


def _page(data: dict[str, Any], **texts: str) -> str:
    escaped = {name: escape(text) for name, text in texts.items()}
    return _template("page.html").substitute(
        escaped,
        body=_template(f"{data['kind']}.html").substitute(escaped).removesuffix("\n"),
        notes="".join(f"<p>{escape(note)}</p>" for note in data.get("notes", ())),
        style=_template("page.css").template,
        script=_template("page.js").template,
        # No text of the data ends the script early.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _template(name: str) -> Template:
    return Template((files(__package__) / name).read_text(encoding="utf-8"))


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

    def range_of(what: str) -> str:
        (least, first), *_, (most, last) = sorted((rank[what], at) for at, rank in enumerate(ranks))
        return f"from {least:.2f} ms (rank {first}) to {most:.2f} ms (rank {last})"

    return f"Compute takes {range_of('compute')}; ranks wait {range_of('wait')}."
