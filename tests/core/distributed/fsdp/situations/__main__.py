"""Prints the table: ``python -m tests.core.distributed.fsdp.situations [PART-OF-A-NAME]``."""

from __future__ import annotations

import sys

from tests.core.distributed.fsdp.situations.table import COMPILED, EAGER, run_rows, situations, verdicts


def main() -> None:
    if len(sys.argv) > 1:
        rows = [name for name in situations() if sys.argv[1] in name]
        for kind in ("fsdp2", "ours"):
            for name, verdict in run_rows(kind, rows).items():
                print(f"{name}, {kind}: {verdict.word}\n    {verdict.reason}", flush=True)
        return
    print("| situation | FSDP2 | ours |\n|---|---|---|")
    for modules in (EAGER, COMPILED):
        theirs, ours = verdicts("fsdp2", modules), verdicts("ours", modules)
        for name, verdict in ours.items():
            print(f"| {name} | {theirs[name].word} | {verdict.word} |")


if __name__ == "__main__":
    main()
