# Sourced. `install train` or `install all` sets PYTHON to a Python that has what training, or training and tests, import.
#
# A python3 whose torch sees a CUDA device is used as it is; only what it lacks is installed, into .venv beside it.
# Elsewhere .venv is made beside the README. torch comes first, with its version from constraints.txt: without a version,
# pip may fetch another build, and gigabytes with it.

MIN_FREE_MIB=2500
IMPORTED_BY_ALL="import torch.distributed.checkpoint, torch.distributed.tensor, torch._dynamo, torch._inductor.compile_fx"

fail() {
    echo "install: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed, got $(python3 --version 2>&1 || true); install one, or name it: PYTHON=/path/to/python3.12 bash $0"
}

# lacks PYTHON GROUP: the packages of a group that a Python does not have, by the names that pip knows.
lacks() {
    "$1" - "$2" <<'EOF'
import importlib.util
import sys

modules = ["torch", "numpy", "einops", "packaging", "tensorboard", "matplotlib"]
if sys.argv[1] == "all":
    modules += ["tokenizers", "sentencepiece", "tiktoken", "rich", "safetensors", "torchao", "triton", "pytest", "pytest_timeout", "xdist", "hypothesis", "ruff", "mypy", "importlinter"]
named = {"pytest_timeout": "pytest-timeout", "xdist": "pytest-xdist", "importlinter": "import-linter"}
print(*(named.get(module, module) for module in modules if importlib.util.find_spec(module) is None))
EOF
}

# has_cuda_torch PYTHON: it has a torch that sees a CUDA device, of a version that setup.py admits.
has_cuda_torch() {
    "$1" - 2>/dev/null <<'EOF'
import sys

import torch

version = tuple(map(int, torch.__version__.split(".")[:2]))
sys.exit(not (2, 11) <= version < (2, 14) or not torch.cuda.is_available())
EOF
}

# make_venv PYTHON [OPTION]: make .venv where there is none yet.
make_venv() {
    # An interrupted installation may have left one without pip.
    .venv/bin/python -m pip --version >/dev/null 2>&1 && return
    local free_mib
    free_mib=$(df -Pm . | awk 'NR == 2 { print $4 }')
    [ "$free_mib" -ge "$MIN_FREE_MIB" ] || fail "about $MIN_FREE_MIB MiB of free disk are needed in $PWD, got $free_mib"
    if ! "$1" -c 'import ensurepip, venv' 2>/dev/null; then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            echo "$1 cannot make virtual environments yet: installing python3-venv with apt-get"
            { apt-get update -qq && apt-get install -y -qq python3-venv; } >/dev/null || true
        fi
        "$1" -c 'import ensurepip, venv' 2>/dev/null ||
            fail "$1 cannot make virtual environments; on Debian: sudo apt-get install python3-venv"
    fi
    "$1" -m venv ${2:-} .venv || fail "$1 -m venv .venv failed; see above"
}

pip_install() {
    # What is never imported need not be compiled: that saves a third of the time.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$@"
}

failed_install() {
    fail "pip could not install what is needed; see above. Free disk here: $(df -Ph . | awk 'NR == 2 { print $4 }'). The same command tries again"
}

install() {
    local extra=$1 python ready=.venv/ready-$1
    python=$(find_python) || exit 1
    # Tools and training run from this checkout also where it is not installed.
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
    if [ ! -f .venv/ready-all ] && [ ! -f "$ready" ] && has_cuda_torch "$python"; then
        install_beside_cuda_torch "$python" "$extra"
        return
    fi
    PYTHON=$PWD/.venv/bin/python
    [ -f .venv/ready-all ] && ready=.venv/ready-all
    if [ -f "$ready" ] && [ "$ready" -nt constraints.txt ] && [ "$ready" -nt setup.py ] && "$PYTHON" -c ''; then
        return
    fi
    ready=.venv/ready-$extra
    echo "installing into .venv: torch (about half a minute, and what the download takes)"
    make_venv "$python"
    pip_install --constraint constraints.txt torch numpy setuptools || failed_install
    echo "installing into .venv: the rest"
    # Meanwhile what all import of torch is compiled: ranks that start together would each do that.
    env -u PYTHONDONTWRITEBYTECODE "$PYTHON" -c "$IMPORTED_BY_ALL" >/dev/null 2>&1 &
    pip_install --constraint constraints.txt --no-build-isolation --editable ".[$extra]" || failed_install
    wait $! || true
    touch "$ready"
}

# install_beside_cuda_torch PYTHON GROUP: as install, and go on without what training can do without.
install_beside_cuda_torch() {
    local missing
    PYTHON=$1
    [ -x .venv/bin/python ] && [ -z "$(lacks .venv/bin/python "$2")" ] && PYTHON=$PWD/.venv/bin/python
    missing=$(lacks "$PYTHON" "$2")
    if [ -z "$missing" ]; then
        echo "$PYTHON has a torch with CUDA and all that is needed: nothing is installed"
        return
    fi
    echo "$PYTHON has a torch with CUDA; installing $missing into .venv beside it"
    if (make_venv "$1" --system-site-packages && pip_install --retries 1 --timeout 10 $missing); then
        PYTHON=$PWD/.venv/bin/python
        return
    fi
    if [ "$2" = all ] || [[ " $missing " == *" numpy "* ]] || [[ " $missing " == *" einops "* ]]; then
        failed_install
    fi
    echo "going on without $missing"
}
