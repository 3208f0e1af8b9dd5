"""parallel.compile=null: blocks are compiled on CUDA, not on a CPU, and a run records the result."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_llm.base.errors import ConfigError
from lightning_llm.compare.cost import SPEED_KEYS
from lightning_llm.compare.runs.differences import ROUNDING, meaningful
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import differences_on_resume
from lightning_llm.plan.describe import layout_facts
from lightning_llm.plan.resolve import DerivedConfig, Plan, compile_note
from lightning_llm.precision.native.decide import DEVICES
from lightning_llm.run import opening
from lightning_llm.tracking.reading import Run

CPU, H100 = DEVICES["cpu"], DEVICES["sm_90"]
BARE = replace(H100, no_compiler="Triton is not installed")
WHOLE = (
    "parallel=fsdp_cp_tp", "trainer.devices=8", "data.global_batch_size=16", "parallel.activation_checkpoint=full"
)  # fmt: skip


def run_of(config: dict[str, object], **summary: object) -> Run:
    return Run(Path(), config, summary)


def plan_of(*words: str, device=CPU) -> Plan:
    return DerivedConfig(compose_config(["model=llama_tiny", "run.name=run", *words]), device).plan()


@pytest.mark.parametrize(
    ("device", "words", "compiled", "note"),
    [
        (CPU, (), False, None),
        (H100, (), True, None),
        (BARE, (), False, "not compiled as on CUDA by default: Triton is not installed"),
        (H100, ("trainer.compile=false",), False, None),
        (BARE, ("trainer.compile=false",), False, None),
        (CPU, ("trainer.compile=true",), True, None),
        (BARE, ("parallel.compile=true",), True, None),  # which a run refuses
        (H100, ("model=moe_tiny",), False, "parallel.compile=true tries it)"),
        (H100, ("model=moe_tiny", "parallel.compile=true"), True, None),
        (H100, WHOLE, False, "fully recomputed blocks under cp=2 and tp=2 together"),
    ],
)
def test_blocks_are_compiled_on_cuda_by_default(device, words, compiled, note):
    plan = plan_of(*words, device=device)
    assert plan.compiled is plan.parallel.compile is compiled
    assert layout_facts(plan)["compile"] is compiled
    found = compile_note(plan.config, plan.degrees, device)
    assert (found is None) if note is None else (found is not None and found.endswith(note))


def test_the_compile_default_is_not_hashed_but_an_explicit_choice_is():
    """Hashes are those of earlier releases, when the default was false."""
    on_cpu, on_gpu = plan_of(), plan_of(device=H100)
    before = plan_of("trainer.compile=false")
    assert on_cpu.identity == on_gpu.identity == before.identity
    assert on_cpu.config == on_gpu.config
    asked = [plan_of(word).identity for word in ("trainer.compile=true", "parallel.compile=true")]
    assert len({before.identity, *asked}) == 3
    assert differences_on_resume(before.config, on_gpu.config) == {}


def test_runs_are_compared_by_the_compilation_that_ran():
    """For a run of an earlier release, the config alone determines whether its blocks were compiled."""
    null, false = {"parallel.compile": None, "trainer.compile": None}, {"parallel.compile": False}
    earlier, here = run_of(false), run_of(null, compiled=False)
    gpu, told = run_of(null, compiled=True), run_of({"parallel.compile": True}, compiled=True)
    assert meaningful(earlier, here) == meaningful(gpu, told) == {}
    assert meaningful(here, gpu) == {"compiled": (False, True)}
    assert "compiled" in ROUNDING
    assert "compiled" in SPEED_KEYS


@pytest.mark.parametrize(
    ("words", "differ"),
    [
        (["parallel=zero3", "precision=bf16"], True),
        (["parallel=zero3", "precision=fp32"], False),
        (["parallel=zero3", "precision=bf16", "precision.wgrad_dtype=fp32"], False),
        (["parallel=ddp", "precision=bf16"], False),
        (["parallel=zero3", "precision=bf16", "trainer.compile=false"], False),
    ],
)
def test_compiled_blocks_under_fsdp_are_reported_to_differ_in_bits(words, differ):
    facts = layout_facts(
        plan_of(*words, "trainer.devices=2", "data.global_batch_size=4", "data.micro_batch_size=1", device=H100)
    )
    assert ("round differently" in (facts["bitwise_problem"] or "")) == differ
    assert facts["bitwise"] != differ


def test_a_run_whose_blocks_cannot_be_compiled_is_refused(monkeypatch):
    monkeypatch.setattr(opening, "no_compiler", lambda device_type: f"nothing compiles for {device_type}")
    with pytest.raises(ConfigError, match=r"parallel\.compile=true: nothing compiles for cpu\. Fix this"):
        opening.check_compiler(plan_of("trainer.compile=true").config, torch.device("cpu"))
    opening.check_compiler(plan_of().config, torch.device("cpu"))
