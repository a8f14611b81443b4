"""The manifests for Kubernetes are lawful for its schemas and those of the operators, and their flags for this framework."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from examples.multi_node import drill
from megatron.training.arguments import parse_settings

FOLDER = Path(drill.__file__).parent / "kubernetes"
FILES = sorted(path.name for path in FOLDER.iterdir())
KUBERNETES = "1.28"
"""The oldest version in whose schemas they are valid."""


@pytest.mark.parametrize("file", FILES)
def test_flags_of_each_manifest_are_served(file: str) -> None:
    """On 4 hosts of 8 ranks. Where a manifest has several templates of pods, they are alike."""
    text = (FOLDER / file).read_text()
    lines = re.findall(r"args:\n((?: +- --\S+\n)+)", text)
    flags = {tuple(line.strip(" -") for line in block.splitlines()) for block in lines}
    assert len(flags) == 1 and len(lines) == (2 if file == "pytorch_job.yaml" else 1)
    settings = parse_settings([f"--{flag}" for flag in next(iter(flags))], world_size=32)
    (complete,) = set(re.findall(r'COMPLETE_AT, value: "(\d+)"', text))
    assert settings.loop.train_iters == int(complete)
    assert settings.watch.status_page is not None and settings.watch.status_page.startswith("/shared/runs/gpt/")


def _documents(file: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((FOLDER / file).read_text()))


def _templates(node: Any) -> list[dict[str, Any]]:
    """The templates of pods anywhere in a document."""
    if isinstance(node, list):
        return [found for inner in node for found in _templates(inner)]
    if not isinstance(node, dict):
        return []
    own = [node["template"]] if "containers" in node.get("template", {}).get("spec", {}) else []
    return own + [found for inner in node.values() for found in _templates(inner)]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_kubernetes_knows_every_field_of_jobs_services_and_pods(file: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate")
    checked = 0
    for document in _documents(file):
        kinds = [document] if document["apiVersion"] in ("v1", "batch/v1") else []
        for template in _templates(document):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": template["spec"]}
            kinds.append(pod)
            # It sees what is wrong.
            planted = {**pod, "spec": {**template["spec"], "restartPolicies": "Never"}}
            with pytest.raises(validator.ValidationError):
                validator.validate(planted, KUBERNETES, strict=True)
        for kind in kinds:
            checked += 1
            validator.validate(kind, KUBERNETES, strict=True)
    assert checked == {"indexed_job.yaml": 3, "pytorch_job.yaml": 2, "train_job.yaml": 1}[file]


@pytest.mark.slow
def test_the_trainer_knows_every_field_of_its_runtime_and_job() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs pip install kubeflow-trainer-api")
    runtime, job = _documents("train_job.yaml")
    for document in (runtime, job):
        model = getattr(models, f"TrainerV1alpha1{document['kind']}")
        assert model.from_dict(document).to_dict() == document, "fields that it does not know are dropped"
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


@pytest.mark.slow
def test_the_training_operator_knows_every_field_of_its_job() -> None:
    models = pytest.importorskip("kubeflow.training.models", reason="needs pip install kubeflow-training")
    (document,) = _documents("pytorch_job.yaml")
    assert _unknown(models, "KubeflowOrgV1PyTorchJob", document) == []
    document["spec"]["runPolicy"]["backofLimit"] = 3
    assert _unknown(models, "KubeflowOrgV1PyTorchJob", document) == ["KubeflowOrgV1RunPolicy.backofLimit"]
    master, worker = document["spec"]["pytorchReplicaSpecs"].values()
    assert master["template"] == worker["template"] and master["replicas"] + worker["replicas"] == 4


def _unknown(models: Any, kind: str, data: dict[str, Any]) -> list[str]:
    """Fields that a kind of the operator's package does not have, in it and in what it holds."""
    model = getattr(models, kind, None)
    if model is None:
        return []  # one of Kubernetes itself
    types = {model.attribute_map[name]: of for name, of in model.openapi_types.items()}
    found = [f"{kind}.{name}" for name in data if name not in types]
    for name, value in data.items():
        inner = re.fullmatch(r"(?:dict\(str, )?(\w+)\)?", types.get(name, ""))
        if inner is not None and isinstance(value, dict):
            values = value.values() if types[name].startswith("dict") else [value]
            found += [unknown for one in values if isinstance(one, dict) for unknown in _unknown(models, inner[1], one)]
    return found
