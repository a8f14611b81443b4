#!/usr/bin/env bash
# Installs what the tests need into .venv, then lints, type-checks and tests, two files at a time. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh
install all
PYTHON=$PYTHON bash tests/check.sh
export OMP_NUM_THREADS=1
exec "$PYTHON" -m pytest -n 2 --dist loadfile "$@"
