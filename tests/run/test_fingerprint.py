"""A run resumed with other software reports it or refuses; different machines are named; known-bad settings."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.base.errors import AgreedError
from lightning_llm.compare.runs.differences import all_differences, meaningful
from lightning_llm.config.compose import compose_config
from lightning_llm.linalg import gemm
from lightning_llm.plan.report import RULES, known_issues
from lightning_llm.plan.resolve import plan_of
from lightning_llm.run import agreement as facts
from lightning_llm.run.agreement import agree_on_fingerprint, driver_version, fingerprint
from lightning_llm.run.resume.start import Start
from lightning_llm.tracking.files import chain_of, sealed_records, summary_of, write_json
from lightning_llm.tracking.provenance import process_mark, send_signal
from lightning_llm.tracking.reading import read_run
from tests.messages import missing

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def begun(small_run, tmp_path_factory):
    """The folder of a run of two steps, and its words."""
    folder = tmp_path_factory.mktemp("fingerprint")
    words = small_run(folder, "trainer.max_steps=2", "trainer.validate_every_steps=null")
    assert main(["train", *words]) == 0
    return folder / "run", words


def test_a_cudnn_that_torch_rejects_is_recorded_and_does_not_stop_the_run(monkeypatch):
    """On an H200 another package had loaded cuDNN 9.14 before torch, which requires 9.19."""

    def rejected():
        raise RuntimeError("cuDNN version incompatibility: compiled against (9, 19, 0), found (9, 14, 0)")

    monkeypatch.setattr(torch.backends.cudnn, "version", rejected)
    assert facts._cudnn_version().startswith("unusable: cuDNN version incompatibility")


def go_on(begun, tmp_path, *more):
    folder, words = begun
    shutil.copytree(folder, tmp_path / "run")
    moved = [word for word in words if not word.startswith("run.") and not word.startswith("trainer.max_steps")]
    return main(["train", *moved, f"run.root={tmp_path}", f"run.dir={tmp_path / 'run'}", "resume=auto", *more])


def changed(monkeypatch, **values):
    """Have this machine say otherwise of itself."""
    monkeypatch.setattr("lightning_llm.run.agreement.fingerprint", lambda device: {**fingerprint(device), **values})


def test_the_fingerprint_records_how_16_bit_products_are_computed(monkeypatch):
    with gemm.unwidened():  # independent of this processor's units
        torches = fingerprint(CPU)
    products = {name: dtype for name, dtype in torches.items() if name.endswith("_products")}
    assert products == {"cpu.bf16_products": "bfloat16", "cpu.fp16_products": "float16"}
    monkeypatch.setattr(gemm, "widened", frozenset([torch.float16]))
    assert fingerprint(CPU) == torches | {"cpu.fp16_products": "float32"}


def test_the_summary_says_what_the_numbers_come_from(begun, monkeypatch):
    recorded = summary_of(begun[0])["fingerprint"]
    assert recorded == fingerprint(CPU)
    assert recorded["os"] == f"{os.uname().sysname} {os.uname().release}"
    assert recorded["cpu"] in torch.__config__.show()
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for name in (
        "MKL_NUM_THREADS",
        "KMP_BLOCKTIME",
        "CUBLAS_LOGINFO_DBG",
        "NVTE_DEBUG_LEVEL",
        "TORCHINDUCTOR_CACHE_DIR",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
    ):
        monkeypatch.setenv(name, "1")
    assert fingerprint(CPU).items() - recorded.items() == {("env.NCCL_ALGO", "Ring"), ("env.NVTE_FUSED_ATTN", "0")}


def test_a_resume_on_another_machine_prints_a_note_and_records_both_values(begun, tmp_path, monkeypatch, capsys):
    changed(monkeypatch, mkl="2099.1")
    assert go_on(begun, tmp_path, "trainer.max_steps=3") == 0
    was = fingerprint(CPU)["mkl"]
    assert (
        f"note   changed since the previous session: fingerprint.mkl {was} -> 2099.1 (resume_strict=true forbids this)"
        in (capsys.readouterr().out)
    )
    assert summary_of(tmp_path / "run")["earlier"]["fingerprint.mkl"] == [was]


@pytest.mark.parametrize("before", [True, False])
def test_a_variable_set_in_only_one_session_is_recorded(begun, tmp_path, monkeypatch, capsys, before):
    if before:
        monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert go_on(begun, tmp_path, "trainer.max_steps=3") == 0
    again = [tmp_path / "run", begun[1]]
    if before:
        monkeypatch.delenv("NCCL_ALGO")
        assert go_on(again, tmp_path / "second", "trainer.max_steps=4") == 0
        assert "fingerprint.env.NCCL_ALGO Ring -> none" in capsys.readouterr().out
        assert summary_of(tmp_path / "second" / "run")["earlier"]["fingerprint.env.NCCL_ALGO"] == [None, "Ring"]
    else:
        assert "NCCL_ALGO" not in capsys.readouterr().out


def test_resume_strict_rejects_runs_without_a_fingerprint(begun, tmp_path, capsys):
    shutil.copytree(begun[0], tmp_path / "old")
    summary = json.loads((tmp_path / "old" / "summary.json").read_text())
    del summary["fingerprint"], summary["code_hash"]
    (tmp_path / "old" / "summary.json").write_text(json.dumps(summary))
    assert go_on([tmp_path / "old", begun[1]], tmp_path / "strict", "trainer.max_steps=3", "resume_strict=true") == 2
    assert "resume_strict=true: cannot be checked: " in capsys.readouterr().err
    assert go_on([tmp_path / "old", begun[1]], tmp_path / "again", "trainer.max_steps=3") == 0
    assert "changed since the previous session" not in capsys.readouterr().out


@pytest.mark.parametrize("where", ["fingerprint", "versions"])
def test_resume_strict_rejects_a_changed_environment_and_writes_nothing(begun, tmp_path, monkeypatch, capsys, where):
    if where == "fingerprint":
        changed(monkeypatch, cpu="AVX2", os="Linux 1.0")
    else:
        monkeypatch.setattr(
            "lightning_llm.run.agreement.versions", lambda: {**summary_of(begun[0])["versions"], "torch": "9"}
        )
    before = {path: path.read_bytes() for path in begun[0].rglob("*") if path.is_file()}
    assert go_on(begun, tmp_path, "trainer.max_steps=3", "resume_strict=true") == 2
    said = capsys.readouterr().err
    keys = re.findall(r"  - ([\w.]+): is ", said)
    assert keys == (["fingerprint.cpu", "fingerprint.os"] if where == "fingerprint" else ["versions.torch"])
    assert "set resume_strict=false" in said
    after = {begun[0] / path.relative_to(tmp_path / "run"): path for path in (tmp_path / "run").rglob("*")}
    assert all(after[path].read_bytes() == content for path, content in before.items())


def test_resume_strict_allows_an_unchanged_environment(begun, tmp_path):
    assert go_on(begun, tmp_path, "trainer.max_steps=3", "resume_strict=true") == 0
    assert summary_of(tmp_path / "run")["resumed_from_step"] == 2


def test_runs_of_earlier_releases_have_no_fingerprint_to_compare(begun, tmp_path):
    shutil.copytree(begun[0], tmp_path / "old")
    summary = summary_of(tmp_path / "old")
    summary["records"] = sealed_records(chain_of(tmp_path / "old" / "metrics.jsonl"), {**summary, "fingerprint": None})
    write_json(tmp_path / "old" / "summary.json", {**summary, "fingerprint": None})
    ours, theirs = read_run(begun[0]), read_run(tmp_path / "old")
    assert not [key for key in all_differences(ours, theirs) if key.startswith("fingerprint")]
    summary["fingerprint"] = {**fingerprint(CPU), "os": "Linux 1.0", "onednn": "1.0"}
    summary["records"] = sealed_records(chain_of(tmp_path / "old" / "metrics.jsonl"), summary)
    write_json(tmp_path / "old" / "summary.json", summary)
    theirs = read_run(tmp_path / "old")
    assert {"fingerprint.os", "fingerprint.onednn"} == {
        key for key in all_differences(ours, theirs) if key.startswith("fingerprint")
    }
    assert "fingerprint.onednn" in meaningful(ours, theirs)
    assert "fingerprint.os" not in meaningful(ours, theirs)


def ranks_that_say(monkeypatch, *each):
    """Have `agree_on_fingerprint` meet ranks with these fingerprints."""

    found = [{f"fingerprint.{key}": value for key, value in its.items()} for its in each]
    monkeypatch.setattr("lightning_llm.run.agreement.gather_objects", lambda own: found)


def test_ranks_whose_machines_differ_are_named(begun, monkeypatch, small_run, tmp_path):
    ranks_that_say(monkeypatch, {"driver": "570.1"}, {"driver": "570.1"}, {"driver": "560.2"}, {"driver": "560.2"})
    config = compose_config(small_run(tmp_path))
    (line,) = agree_on_fingerprint(config, Start(), {"fingerprint": {"driver": "570.1"}})
    assert missing(line, "note ", "fingerprint.driver", "570.1", "560.2", "2, 3") == []
    checkpoint = SimpleNamespace(step=2, run_folder=begun[0])  # its fingerprint differs, too
    strict = config.model_copy(update={"resume_strict": True})
    with pytest.raises(AgreedError, match=r"fingerprint.driver: is 560.2 on rank 3, but 570.1 on rank 0"):
        agree_on_fingerprint(strict, Start(checkpoint=checkpoint), {"fingerprint": {"driver": "570.1"}})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build", "570.86.15"),
        ("", ""),
    ],
)
def test_the_driver_s_version(text, version):
    assert driver_version(text) == version


@pytest.mark.parametrize(
    ("hardware", "environment", "said"),
    [
        ("h100", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS=1 is for Megatron"),
        ("h100", {"NVIDIA_TF32_OVERRIDE": "1"}, "NVIDIA_TF32_OVERRIDE=1 turns fp32 products into TF32"),
        ("cpu", {"ONEDNN_DEFAULT_FPMATH_MODE": "bf16"}, "ONEDNN_DEFAULT_FPMATH_MODE=bf16 lets oneDNN"),
        ("h100", {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NVIDIA_TF32_OVERRIDE": "0"}, None),
        ("cpu", {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"}, None),
    ],
)
def test_known_bad_settings_are_reported(hardware, environment, said):
    for words in (["parallel=zero3"], ["parallel=fsdp_cp", "parallel.dp_shard=1"]):
        config = compose_config([*words, "world=2", f"hardware={hardware}", "data.global_batch_size=8"])
        lines = known_issues(plan_of(config), environment)
        assert [line.partition(said or "?")[1] for line in lines] == ([said] if said else [])


def test_plan_prints_known_issues(small_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    assert main(["plan", *small_run(tmp_path)]) == 0
    assert "note   here ONEDNN_DEFAULT_FPMATH_MODE=BF16" in capsys.readouterr().out


def test_every_rule_is_in_the_documentation():
    table = (Path(__file__).parents[2] / "docs" / "reference" / "checkpoints.md").read_text()
    assert [rule.__name__ for rule in RULES if (rule.__doc__ or "").partition("\n")[0].rstrip(".") not in table] == []


def test_a_signal_without_permission_is_reported_as_not_sent(monkeypatch):
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert not send_signal(process_mark(), 0)
