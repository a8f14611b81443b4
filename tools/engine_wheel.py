"""Build a wheel of the engine alone: any module is sharded with it, torch is what it needs, and Megatron may lie beside it.

Example::

    python tools/engine_wheel.py dist
    pip install dist/rowshard-*.whl

Its package is ``rowshard`` instead of ``megatron.core.distributed.fsdp``: Megatron-Core installs files of that name. What needs
Megatron's model is left out: ``FullyShardedDataParallel``, and the import paths of Megatron-FSDP. It requires torch, einops and
numpy: torch.distributed uses numpy to send objects, but torch does not depend on it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
NAME = "rowshard"
ENGINE, EXTENSIONS = "megatron.core.distributed.fsdp", "megatron.core.extensions"
LEFT_OUT = ("adapter", "src", "mcore_fsdp_adapter.py")
INCLUDED = (".py", ".html", ".css", ".js")
LEFT_OUT_NAMES = ("FSDPDistributedIndex", "FullyShardedDataParallel", "ModelChunks")
SHARED = ("child_process", "module_names", "regular_file")
OPTIONAL = ("triton_language", "transformer_engine_histories", "transformer_engine_weights")
# In place of the layers under Megatron-Core's names, which need its model.
TRANSFORMER_ENGINE = '''"""transformer-engine, as the engine asks for it. Importing this file without it raises ImportError."""

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

__all__ = ["recipes", "te"]
'''
DESCRIPTION = f"""Fully sharded data parallelism for any module, with the names of PyTorch's FSDP2.

    from {NAME} import fully_shard, fully_shard_optimizer  # or from {NAME}.fsdp2, with FSDP2's numbers

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))

`{NAME}.huggingface` has models of transformers and trainers, `{NAME}.checkpoint` checkpoints that any number of ranks loads.
"""


def build(folder: Path) -> Path:
    """Write the wheel into the folder, which is made if it is not there; return its path."""
    version, requirements = _versions()
    info = f"{NAME}-{version}.dist-info"
    files = {f"{NAME}/{name}": text for name, text in sources().items()}
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n"
        "Summary: Fully sharded data parallelism for any module\nLicense: Apache-2.0\nRequires-Python: >=3.11\n"
        f"{''.join(f'Requires-Dist: {name}{chr(10)}' for name in requirements)}Description-Content-Type: text/markdown\n\n{DESCRIPTION}"
    )
    files[f"{info}/LICENSE"] = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: engine_wheel\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{name},sha256={_digest(text)},{len(text.encode())}\n" for name, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def sources() -> dict[str, str]:
    """Return the files of the package by their names in it."""
    engine = REPOSITORY / ENGINE.replace(".", "/")
    found = {"py.typed": "", "extensions/__init__.py": '"""Optional packages."""\n'}
    for path in sorted(engine.rglob("*")):
        name = path.relative_to(engine)
        if path.suffix in INCLUDED and name.parts[0] not in LEFT_OUT:
            found[name.as_posix()] = _renamed(path)
    for module in SHARED:
        found[f"{module}.py"] = _renamed(REPOSITORY / f"megatron/core/{module}.py")
    for module in OPTIONAL:
        path = REPOSITORY / EXTENSIONS.replace(".", "/") / f"{module}.py"
        found[f"extensions/{module}.py"] = _renamed(path)
    found["extensions/transformer_engine.py"] = TRANSFORMER_ENGINE
    left_out = "|".join(LEFT_OUT_NAMES)
    found["__init__.py"] = re.sub(rf'^    "({left_out})",\n', "", found["__init__.py"], flags=re.MULTILINE)
    return found


def _renamed(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    text = text.replace(ENGINE, NAME).replace(EXTENSIONS, f"{NAME}.extensions")
    return re.sub(rf"megatron\.core\.({'|'.join(SHARED)})\b", rf"{NAME}.\1", text)


def _versions() -> tuple[str, list[str]]:
    """Return the version of the engine, and its requirements."""
    text = (REPOSITORY / "megatron/core/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    requirements = re.findall(
        r'"((?:torch|numpy|einops)>=[^"]+)"', (REPOSITORY / "setup.py").read_text(encoding="utf-8")
    )
    return version, requirements


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheel is written")
    print(build(parser.parse_args().folder))
