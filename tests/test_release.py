"""The release workflow and the Homebrew formula: what can be held without running them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
FORMULA = (ROOT / "packaging" / "homebrew" / "mlxrunner.rb").read_text()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_is_whole(workflow: Path) -> None:
    """Each job has a machine, a limit and steps, and needs only jobs that exist."""
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    for job in jobs.values():
        assert job["runs-on"]
        assert job["timeout-minutes"] <= 60
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
        needs = job.get("needs", [])
        assert {*([needs] if isinstance(needs, str) else needs)} <= jobs.keys()


def test_only_a_tag_publishes_and_only_what_was_tried() -> None:
    """By a token of the workflow itself, which no other job can get."""
    jobs = RELEASE["jobs"]
    assert RELEASE["permissions"] == {"contents": "read"}
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert jobs["publish"]["needs"] == ["try", "formula"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["assets"]["needs"] == "publish"
    others = {name for name, job in jobs.items() if "permissions" in job}
    assert others == {"publish", "assets"}
    assert "password" not in (ROOT / ".github/workflows/release.yml").read_text().replace(
        "without a password", ""
    )


def test_the_wheel_is_tried_on_both_systems() -> None:
    """In an empty environment."""
    assert RELEASE["jobs"]["try"]["strategy"]["matrix"]["os"] == ["macos-15", "ubuntu-24.04"]


def test_the_workflow_fills_every_place_of_the_formula() -> None:
    """None is left for a user to meet."""
    places = set(re.findall(r"@[A-Z0-9]+@", FORMULA))
    steps = " ".join(step.get("run", "") for step in RELEASE["jobs"]["formula"]["steps"])
    assert places == set(re.findall(r"s\|(@[A-Z0-9]+@)\|", steps))
    for name in ("url", "sha256", "license", "homepage", "desc"):
        assert re.search(rf"(?m)^  {name} \"", FORMULA)
