"""Packaging: ``pip install -e .`` installs the library, ``pip install -e .[all]`` all that scripts and tests use."""

from setuptools import find_namespace_packages, setup

EXTRAS = {
    "train": ["tokenizers>=0.20", "sentencepiece>=0.2", "tensorboard>=2.17", "matplotlib>=3.9", "rich>=13"],
    "test": ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "ruff>=0.6", "mypy>=1.11"],
    "wandb": ["wandb>=0.17"],
}
EXTRAS["all"] = EXTRAS["train"] + EXTRAS["test"]

setup(
    name="megatron-fsdp-trainer",
    version="0.1.0",
    description="Megatron-style GPT training on fully sharded data parallelism",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["megatron", "megatron.*"]),
    install_requires=["torch>=2.11", "numpy>=1.26", "einops>=0.8", "safetensors>=0.4"],
    extras_require=EXTRAS,
    classifiers=["Programming Language :: Python :: 3", "License :: OSI Approved :: Apache Software License"],
)
