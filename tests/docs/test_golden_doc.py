"""docs/howto/golden.md: the workflow is valid for GitHub, the commands run, and the numbers hold."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from lightning_llm.__main__ import main
from lightning_llm.cli.command_line import _parse
from lightning_llm.config.compose import compose_config
from lightning_llm.golden import FALSE_ALARMS
from lightning_llm.golden.curve import Band, Curve, Noise
from lightning_llm.plan.check import check_config

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "howto" / "golden.md").read_text(encoding="utf-8")
WORKFLOW = re.search(r"^```yaml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE).group(1)


def test_the_workflow_is_valid():
    """Check the part of GitHub's schema that applies (json.schemastore.org/github-workflow.json)."""
    assert WORKFLOW.startswith("# .github/workflows/golden.yml\n")
    workflow = yaml.load(WORKFLOW, Loader=yaml.BaseLoader)  # as GitHub reads it: `on` is a word, not YAML 1.1's true
    assert workflow.keys() == {"name", "on", "permissions", "jobs"}
    assert set(workflow["on"]) <= {"push", "pull_request", "schedule", "workflow_dispatch"}
    (job,) = workflow["jobs"].values()
    assert re.fullmatch(r"ubuntu-\d\d\.04", job["runs-on"])
    assert job.keys() == {"runs-on", "timeout-minutes", "steps"}
    for step in job["steps"]:
        assert ("uses" in step) != ("run" in step)
        assert step.keys() <= {"name", "uses", "run", "with"}
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/checkout@v4"))


def command_of_workflow() -> list[str]:
    (command,) = (step["run"] for step in steps() if step.get("run", "").startswith("lightning-llm "))
    return shlex.split(command)[1:]


def steps() -> list[dict]:
    (job,) = yaml.safe_load(WORKFLOW)["jobs"].values()
    return job["steps"]


def test_the_workflow_runs_golden_check_on_a_valid_recipe():
    arguments = _parse(command_of_workflow())
    assert (arguments.verb, arguments.action) == ("golden", "check")
    check_config(compose_config(arguments.overrides))


@pytest.mark.full
def test_the_workflows_command_has_the_right_exit_codes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = command_of_workflow()
    assert main(words) == 2  # nothing is recorded yet
    assert "lightning-llm golden record, with the same words" in capsys.readouterr().err
    recorded = [words[0], "record", *words[2:]]
    assert main([*recorded, "--steps", "1"]) == 0
    assert main(words) == 0
    file = tmp_path / "golden" / "quickstart.json"
    data = json.loads(file.read_text())
    data["curve"]["loss"][0] += 1e-5
    file.write_text(json.dumps(data))
    assert main(words) == 1


def test_the_band_widths_on_the_page_are_correct():
    assert f"`--false-alarms` ({FALSE_ALARMS})" in TEXT
    widths = re.search(
        r"with 3,000 numbers it is (\d+) s of 3 runs, (\d+) s of 6, ([\d.]+) s of 11", " ".join(TEXT.split())
    )
    for runs, told in zip((3, 6, 11), widths.groups(), strict=True):
        curves = [
            Curve([1.0 + run] * 3, [1.0] * 3, [0.0] * 3, {str(n): [1.0] * 3 for n in range(998)}) for run in range(runs)
        ]
        band = Band(Noise.of(curves, nudged=False), FALSE_ALARMS)
        assert band.compared == 3000
        assert f"{band.deviations:.1f}".removesuffix(".0") == told or f"{band.deviations:.0f}" == told


def test_the_page_shows_record_and_check():
    shown = re.findall(r"^lightning-llm golden (\w+)", TEXT, re.MULTILINE)
    assert set(shown) == {"record", "check"}


@pytest.mark.full
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="has no other kernels to check by")
def test_other_kernels_are_within_the_band_and_faults_outside(capfd):
    file = ROOT / "docs" / "internals" / "golden_on_other_kernels.py"
    spec = importlib.util.spec_from_file_location("golden_on_other_kernels", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["bf16"])
    row = capfd.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"\| `bf16` \| step \d+ \| within \(0\.\d+ of it\) \| 21 of 21 \|", row)
