# Sourced: makes .venv beside the repository's README once, and installs what training and tests use.
# torch comes first and pinned: an unpinned torch fetches gigabytes of CUDA libraries.
if [ ! -f .venv/ready ] || [ constraints.txt -nt .venv/ready ] || [ setup.py -nt .venv/ready ]; then
    echo "installing into .venv (about a minute)"
    python3 -m venv .venv || { echo "python3 -m venv failed: on Debian, 'apt-get install python3-venv' provides it"; exit 1; }
    .venv/bin/python -m pip install --quiet --constraint constraints.txt torch numpy setuptools
    .venv/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[all]'
    touch .venv/ready
fi
source .venv/bin/activate
