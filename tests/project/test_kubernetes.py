"""What examples/kubernetes and docs/kubernetes.md show is what Kubernetes takes: by schemas that know every field."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from harness import ROOT
from jsonschema import Draft7Validator, ValidationError, validators

EXAMPLES = {
    path.name: list(yaml.safe_load_all(path.read_text())) for path in (ROOT / "examples/kubernetes").glob("*.yaml")
}
PAGE = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.S)
KINDS = {
    "job.yaml": ["Service", "Job"],
    "jobset.yaml": ["JobSet"],
    "trainjob.yaml": ["TrainingRuntime", "TrainJob"],
    "rayjob.yaml": ["RayJob"],
}
CUSTOM = yaml.safe_load(Path(__file__).with_name("crds.yaml").read_text())
OLD, LATEST = "1.28", kubernetes_validate.latest_version()
FREE = {"labels", "limits", "rayStartParams", "requests", "selector"}
"""Their keys are no fields."""


def validate(resource: dict[str, Any], version: str) -> None:
    """Raises ValidationError. version: of Kubernetes."""
    if resource["kind"] not in CUSTOM:
        kubernetes_validate.validate(resource, version, strict=True)
        return
    custom = CUSTOM[resource["kind"]]
    properties = {
        "apiVersion": {"const": custom["version"]},
        "kind": {},
        "metadata": {"kubernetes": "ObjectMeta"},
        "spec": custom["spec"],
    }
    schema = {"properties": properties, "required": list(properties)}
    checks = {"properties": check_fields, "kubernetes": lambda *about: check_embedded(version, *about)}
    validators.extend(Draft7Validator, checks)(schema).validate(resource)


def check_fields(validator: Any, properties: dict[str, Any], value: Any, schema: Any) -> Iterator[ValidationError]:
    """As kubectl does, refuse fields that the schema does not have."""
    for name in set(value) - set(properties):
        yield ValidationError(f"{name}: there is no such field")
    yield from Draft7Validator.VALIDATORS["properties"](validator, properties, value, schema)


def check_embedded(version: str, validator: Any, what: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    """A part that is Kubernetes's own, within a resource of Kubernetes's own."""
    whole = {
        "ObjectMeta": {"apiVersion": "v1", "kind": "ConfigMap", "metadata": value},
        "PodTemplateSpec": {"apiVersion": "v1", "kind": "PodTemplate", "template": value},
        "JobTemplateSpec": {"apiVersion": "batch/v1", "kind": "Job", **value},
    }[what]
    try:
        kubernetes_validate.validate(whole, version, strict=True)
    except ValidationError as error:
        yield error


def fields(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The path of each field in it."""
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from fields(each, *path, index)
    elif isinstance(value, dict) and not FREE & set(path[-1:]):
        for name, each in value.items():
            yield (*path, name)
            yield from fields(each, *path, name)


def misspelt(resource: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    wrong = inner = copy.deepcopy(resource)
    for step in path[:-1]:
        inner = inner[step]
    inner[f"{path[-1]}s"] = inner.pop(path[-1])
    return wrong


@pytest.mark.parametrize("version", [OLD, LATEST])
@pytest.mark.parametrize("name", KINDS)
def test_it_is_valid(name: str, version: str) -> None:
    assert [resource["kind"] for resource in EXAMPLES[name]] == KINDS[name]
    for resource in EXAMPLES[name]:
        validate(resource, version)


def test_there_are_no_others() -> None:
    assert set(EXAMPLES) == set(KINDS)


def test_what_the_page_shows_is_valid() -> None:
    network, failure = map(yaml.safe_load, PAGE)
    assert network["kind"] == "NetworkPolicy"
    validate(network, LATEST)
    _, job = copy.deepcopy(EXAMPLES["job.yaml"])
    job["spec"].update(failure)
    validate(job, LATEST)


@pytest.mark.parametrize("name", KINDS)
def test_each_misspelt_field_would_be_noticed(name: str) -> None:
    for resource in EXAMPLES[name]:
        paths = [path for path in fields(resource) if path not in (("apiVersion",), ("kind",))]
        assert ("metadata", "name") in paths
        for path in paths:
            with pytest.raises(ValidationError):
                validate(misspelt(resource, path), LATEST)
                pytest.fail(f"{path} is no field of {resource['kind']}, and yet may be left out")


def test_a_missing_field_and_a_wrong_value_would_be_noticed() -> None:
    (ray,) = EXAMPLES["rayjob.yaml"]
    for field, value in (("groupName", None), ("replicas", "two"), ("template", {"spec": {"containers": "none"}})):
        wrong = copy.deepcopy(ray)
        group = wrong["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
        if value is None:
            del group[field]
        else:
            group[field] = value
        with pytest.raises(ValidationError):
            validate(wrong, LATEST)
