#!/usr/bin/env bash
# Installs what the tests need into .venv, then lints, type-checks and tests, three files at a time: most of
# a test's time is waiting for ranks. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh
install all
PYTHON=$PYTHON bash tests/check.sh
export OMP_NUM_THREADS=1
exec "$PYTHON" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
