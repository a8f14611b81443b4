#!/usr/bin/env bash
# Lints, checks the layers of imports and the types, with $PYTHON or .venv's Python: tests/run.sh and pre-commit run this.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -c 'import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))'
"$PYTHON" -m mypy megatron tools examples benchmarks tests pretrain_gpt.py pretrain_hybrid.py pretrain_mamba.py
