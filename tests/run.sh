#!/usr/bin/env bash
# Installs what the tests need into .venv, then lints, type-checks and tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh
ruff check .
ruff format --check .
mypy megatron
export OMP_NUM_THREADS=1
python -m pytest "$@"
