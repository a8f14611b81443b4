#!/usr/bin/env bash
# Installs what is needed and trains a small GPT; run it again to train on. Arguments go to examples/quickstart.py.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh
install train
exec "$PYTHON" examples/quickstart.py "$@"
