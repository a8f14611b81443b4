"""Packaging: ``pip install -e .`` installs the library, ``pip install -e .[all]`` all that scripts and tests use."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

EXTRAS = {
    # What the example, the tools and --tensorboard-dir use.
    "train": ["tensorboard>=2.17", "matplotlib>=3.9", "rich>=13"],
    "tokenizers": ["tokenizers>=0.20", "sentencepiece>=0.2"],
    "wandb": ["wandb>=0.17"],
    # Triton runs kernels on CPUs under its interpreter, which tests their arithmetic.
    "test": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "safetensors>=0.4",
        "triton>=3.3",
        "ruff>=0.6",
        "mypy>=1.11",
    ],
}
EXTRAS["all"] = EXTRAS["train"] + EXTRAS["tokenizers"] + EXTRAS["test"]

setup(
    name="megatron-fsdp-trainer",
    version="0.1.0",
    description="Megatron-style GPT training on fully sharded data parallelism",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["megatron", "megatron.*"]),
    install_requires=["torch>=2.11", "numpy>=1.26"],
    extras_require=EXTRAS,
    classifiers=["Programming Language :: Python :: 3", "Typing :: Typed"],
)
