"""Pretraining of a hybrid model: ``pretrain_gpt.py``, which reads ``--hybrid-layer-pattern``, by the name that launch scripts call."""

from __future__ import annotations

import sys

from megatron.training.launch.failures import run_script
from pretrain_gpt import main

if __name__ == "__main__":
    run_script(main, sys.argv[1:])
