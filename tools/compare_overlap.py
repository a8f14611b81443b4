"""Compare two overlap reports: what changed from A to B, unit by unit.

Example::

    python tools/compare_overlap.py eager graph --page comparison.html

The folders are those of ``--overlap-report`` or of ``OverlapReport``. The units that changed most are printed; the page has all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.distributed.fsdp.overlap_report import (
    compare_reports,
    comparison_page,
    comparison_text,
    read_report,
)


def main(argv: list[str] | None = None) -> int:
    """Print the comparison, and write its page if that is asked; return 2 where a report cannot be read, or the page not written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("a", type=Path, metavar="A", help="folder of a report, or its overlap.json")
    parser.add_argument("b", type=Path, metavar="B", help="another")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the comparison as a page, too")
    args = parser.parse_args(argv)
    try:
        comparison = compare_reports(read_report(args.a), read_report(args.b), names=(str(args.a), str(args.b)))
    except (OSError, ValueError) as error:
        print(f"compare_overlap.py: error: {error}", file=sys.stderr)
        return 2
    print(comparison_text(comparison))
    if args.page is not None:
        try:
            args.page.write_text(comparison_page(comparison), encoding="utf-8")
        except OSError as error:
            print(f"compare_overlap.py: error: --page must be a file that can be written, got {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
