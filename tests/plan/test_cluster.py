"""Cluster files: shipped ones have sources, impossible ones are refused with all that is wrong."""

import re
from importlib import resources

import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.base.hardware import COMPUTE_UNITS, MEMORY_GIB, planned_peak_flops
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash
from lightning_llm.config.from_file import read_file
from lightning_llm.config.schema import ClusterConfig
from lightning_llm.plan.resolve import plan_of

FILES = {
    file.name.removesuffix(".yaml"): file for file in (resources.files("lightning_llm.conf") / "cluster").iterdir()
}
DESCRIBED = sorted(FILES.keys() - {"none"})


@pytest.mark.parametrize("name", DESCRIBED)
def test_every_figure_has_its_source(name):
    text = FILES[name].read_text(encoding="utf-8")
    cluster = ClusterConfig.model_validate(yaml.safe_load(text))
    assert cluster.name == name
    assert cluster.hardware in MEMORY_GIB
    assert cluster.hardware in COMPUTE_UNITS
    assert planned_peak_flops(cluster.hardware, "bf16")
    figures = [line for line in text.splitlines() if re.search(r"(gb_per_second|microseconds): ", line)]
    assert len(figures) >= 6
    assert not [line for line in figures if "#" not in line]


def test_all_problems_of_a_cluster_are_reported_at_once(capsys):
    words = ["cluster=h100_dgx", "hardware=b200", "cluster.memory_gb_per_second=-1", "cluster.devices_per_package=3"]
    words += ["cluster.between_nodes.gb_per_second=500", "cluster.start_microseconds=1e9"]
    assert main(["plan", *words]) == 2
    said = capsys.readouterr().err
    for text in (
        "cluster.memory_gb_per_second=-1: must be greater than or equal to 0.001",
        "cluster.start_microseconds=1000000000.0: must be less than or equal to 1000000",
        "hardware: is b200, and cluster=h100_dgx has h100",
        "cluster.between_nodes.gb_per_second: is 500, above cluster.within_node.gb_per_second=450",
        "cluster.devices_per_package=3: must divide cluster.devices_per_node=8",
    ):
        assert text in said, text
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster.within_node.gb_per_second=3600"], "above cluster.memory_gb_per_second=3350, from which it is read"),
        (["cluster.peak_tflops={fp8: 1000}"], "cluster.peak_tflops: has no bf16, the run's compute dtype. Add it"),
        (
            ["cluster.devices_per_package=2", "cluster.within_package={gb_per_second: 1e5, latency_microseconds: 1}"],
            "cluster.within_package.gb_per_second: is 100000, above cluster.memory_gb_per_second=3350",
        ),
        (
            ["trainer.devices=16", "parallel=zero3", "data.global_batch_size=16", "data.micro_batch_size=1"],
            "trainer.devices=16: must be at most 8, the devices per machine of cluster=h100_dgx. Set it to 8, and "
            "world=16 for all ranks.",
        ),
        (
            [
                "trainer.devices=16",
                "world=64",
                "parallel=zero3",
                "data.global_batch_size=64",
                "data.micro_batch_size=1",
            ],
            "Set it to 8, and world=64 for all ranks.",
        ),
        (["cluster.devices_per_package=2"], "cluster.within_package is null. Give both"),
        (["cluster.hardware=cpu"], "cluster.peak_tflops: has no bf16, and no peak of cpu is known"),
        (["cluster.within_package={gb_per_second: 1, latency_microseconds: 1}"], "is 1, below cluster.within_node"),
        (["cluster.peak_tflops={bf16: 1e-9}"], "cluster.peak_tflops.bf16=1e-09: must be greater than or equal to"),
        (["cluster.peak_tflops={bf16: 0.9}"], "cluster.peak_tflops.bf16=0.9: must be 0.01 to 1.2 times 989.5"),
        (["cluster.peak_tflops={bf16: 1979}"], "cluster.peak_tflops.bf16=1979: must be 0.01 to 1.2 times 989.5"),
    ],
)
def test_impossible_clusters_are_refused(words, said, capsys):
    assert main(["plan", "cluster=h100_dgx", *words]) == 2
    assert said in capsys.readouterr().err


def test_figures_without_a_selected_cluster_are_one_problem(capsys):
    words = ["cluster.between_nodes.gb_per_second=25", "cluster.start_microseconds=1", "trainer.max_steps=-1"]
    assert main(["plan", *words]) == 2
    problems = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  - ")]
    assert len(problems) == 2  # the step's, too
    assert "cluster: is none, and cluster.between_nodes, cluster.start_microseconds changes" in problems[0]


def test_a_selected_cluster_overrides_a_presets_hardware(tmp_path, capsys):
    words = ["recipe=megatron_2021_1b7", "cluster=h100_dgx"]
    assert compose_config(words).planned_hardware == "h100"
    assert compose_config(words[:1]).hardware == "a100"
    assert main(["plan", *words, "hardware=a100"]) == 2  # typed as well: one of the two is not meant
    assert "hardware: is a100, and cluster=h100_dgx has h100" in capsys.readouterr().err
    file = tmp_path / "config.yaml"
    assert main(["config", *words[:1]]) == 0
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_file(file, words[1:]).checked().planned_hardware == "h100"


def test_a_measured_cluster_is_taken_from_the_users_folder(tmp_path, capsys):
    assert main(["plan", "cluster=measured"]) == 2
    assert "`lightning-llm health` measures machines" in capsys.readouterr().err
    (tmp_path / "cluster").mkdir()
    text = FILES["h100_dgx"].read_text(encoding="utf-8").replace("hardware: h100", "hardware: cpu")
    (tmp_path / "cluster" / "measured.yaml").write_text(text.replace("h100_dgx", "measured") + "peak_tflops: {bf16: 1}")
    words = ["--config-dir", str(tmp_path), "plan", "cluster=measured"]
    assert main([words[2], *words[:2], *words[3:]]) == 0
    assert "cpu at measured peaks (bf16 1 TFLOP/s)" in capsys.readouterr().out


def test_no_run_depends_on_the_cluster_it_was_planned_for():
    words = ["parallel=zero3", "world=8", "trainer.devices=1", "data.global_batch_size=16", "data.micro_batch_size=1"]
    alone = plan_of(compose_config(words))
    for name in DESCRIBED:
        planned = plan_of(compose_config([*words, f"cluster={name}"]))
        assert planned.config.parallel == alone.config.parallel, name  # reduction=auto, above all
        assert config_hash(planned.config) == config_hash(alone.config), name
    assert plan_of(
        compose_config([*words, "cluster=h100_dgx", "cluster.devices_per_node=1"])
    ).config.parallel.reduction == (alone.config.parallel.reduction)
