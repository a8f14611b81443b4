"""Overlap report: for one step, where each unit's time and the device's memory went.

``OverlapReport`` writes it, ``read_report`` and ``compare_reports`` read it.
"""

from megatron.core.distributed.fsdp.overlap_report.compare import compare_reports, comparison_text
from megatron.core.distributed.fsdp.overlap_report.intervals import Interval, length, overlap, union
from megatron.core.distributed.fsdp.overlap_report.page import comparison_page
from megatron.core.distributed.fsdp.overlap_report.recorder import OverlapReport
from megatron.core.distributed.fsdp.overlap_report.report import check_folder, read_report

__all__ = [
    "Interval",
    "OverlapReport",
    "check_folder",
    "compare_reports",
    "comparison_page",
    "comparison_text",
    "length",
    "overlap",
    "read_report",
    "union",
]
