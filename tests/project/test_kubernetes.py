"""examples/kubernetes/job.yaml is what the API of Kubernetes takes: by its schema, which knows every field."""

from __future__ import annotations

import kubernetes_validate
import pytest
import yaml
from harness import ROOT

RESOURCES = list(yaml.safe_load_all((ROOT / "examples/kubernetes/job.yaml").read_text()))


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_it_is_valid(version: str) -> None:
    assert [resource["kind"] for resource in RESOURCES] == ["Service", "Job"]
    for resource in RESOURCES:
        kubernetes_validate.validate(resource, version, strict=True)


def test_a_field_that_does_not_exist_would_be_noticed() -> None:
    job = RESOURCES[1]
    wrong = {**job, "spec": {**job["spec"], "completionsMode": "Indexed"}}
    with pytest.raises(kubernetes_validate.ValidationError, match="completionsMode"):
        kubernetes_validate.validate(wrong, "1.28", strict=True)
