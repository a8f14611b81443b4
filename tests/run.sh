#!/usr/bin/env bash
# Installs what the tests need into .venv, then tests, and meanwhile lints and type-checks. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh
install all
# Many tests start interpreters that import torch: where none may store byte code, each compiles it, in eight seconds of a core.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=1
printed=$(mktemp)
# In the time that tests wait.
PYTHON=$PYTHON nice bash tests/check.sh >"$printed" 2>&1 &
checks=$!
trap 'kill $checks 2>/dev/null || true; rm "$printed"' EXIT
status=0
# More workers than cores, since tests also wait.
"$PYTHON" -m pytest -n 4 --dist loadfile --no-loadscope-reorder "$@" || status=$?
wait $checks || status=1
cat "$printed"
exit $status
