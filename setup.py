"""Packaging: ``pip install -e .`` installs the library, ``pip install -e .[all]`` all that scripts and tests use."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

FOLDER = Path(__file__).parent
# Read, not imported: a build has no torch.
VERSION = re.findall(r'^__version__ = "(.+)"$', (FOLDER / "megatron/core/__init__.py").read_text(), re.MULTILINE)[0]

EXTRAS = {
    # What the example, the tools and --tensorboard-dir use.
    "train": ["tensorboard>=2.17", "matplotlib>=3.9", "rich>=13"],
    "tokenizers": ["tokenizers>=0.20", "sentencepiece>=0.2", "tiktoken>=0.7"],
    "wandb": ["wandb>=0.17"],
    # Models of transformers: megatron.core.distributed.fsdp.huggingface.
    "huggingface": ["transformers>=5.20", "peft>=0.20"],
    # Other libraries around the engine: python -m pytest tests/third_party. Not part of "all", nor of CI.
    "third-party": [
        "transformers>=5.20",
        "peft>=0.20",
        "accelerate>=1.10",
        "lightning>=2.6",
        "trl>=1.16",
        "datasets>=5",
        "timm>=1.0.20",
        "diffusers>=0.40",
        "bitsandbytes>=0.50",
    ],
    # What knows the fields of the manifests in examples/multi_node/kubernetes: python -m pytest -m slow tests/examples. Not part of "all".
    "kubernetes": ["kubernetes-validate>=1.28", "kubeflow-trainer-api>=2.1", "kubeflow-training>=1.9", "pyyaml>=6"],
    # Kernels of gated delta nets on GPUs. Not part of "all".
    "fla": ["flash-linear-attention>=0.3"],
    # Compiled against the torch that is there: pip install --no-build-isolation -e .[te]. Not part of "all".
    "te": ["transformer-engine[pytorch]>=2.20"],
    # Compiled likewise, with APEX_CPP_EXT=1 APEX_CUDA_EXT=1 in the environment; the package of that name on PyPI is another.
    "apex": ["apex @ git+https://github.com/NVIDIA/apex"],
    # Kernels of Mamba-2, on CUDA in bf16; without them plain PyTorch computes the same. Not part of "all".
    "mamba": ["mamba-ssm>=2.2"],
    # Triton runs kernels on CPUs under its interpreter, which tests their arithmetic.
    "test": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "safetensors>=0.4",
        "torchao>=0.15",
        "triton>=3.3",
        "ruff>=0.6",
        "mypy>=1.11",
        "import-linter>=2.6",
    ],
}
EXTRAS["all"] = EXTRAS["train"] + EXTRAS["tokenizers"] + EXTRAS["test"]

setup(
    name="megatron-fsdp-trainer",
    version=VERSION,
    description="Megatron-style GPT training on fully sharded data parallelism",
    long_description=(FOLDER / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["megatron", "megatron.*"]),
    # PEP 561: in a namespace package, each of its packages says that it is typed.
    package_data={
        "megatron.core": ["py.typed", "upstream_fields.json"],
        "megatron.core.distributed.fsdp.overlap_report": [
            "comparison.html",
            "page.css",
            "page.html",
            "page.js",
            "report.html",
        ],
        "megatron.training": ["py.typed"],
        "megatron.training.cli": ["upstream_flags.json"],
        "megatron.training.planner.devices": ["h200.json"],
        "megatron.training.telemetry.watch": ["status_page.html"],
    },
    # Above, too: DTensor's placements of uneven rows rest on what these versions of torch do inside.
    install_requires=["torch>=2.11,<2.14", "numpy>=1.26", "einops>=0.8", "packaging>=23"],
    extras_require=EXTRAS,
    classifiers=["Programming Language :: Python :: 3", "Typing :: Typed"],
)
