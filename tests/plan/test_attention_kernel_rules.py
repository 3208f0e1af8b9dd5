"""trainer.attention_kernel: refusals before a device is used. 1 s."""

import pytest

from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash, differences_on_resume
from lightning_llm.config.schema.aliases import migrate
from lightning_llm.plan.attention_kernel import attention_kernel_problems
from lightning_llm.plan.report import plan_facts
from lightning_llm.plan.resolve import DerivedConfig, plan_of
from lightning_llm.precision.native.decide import DEVICES


@pytest.mark.parametrize(
    ("words", "device", "said"),
    [
        (("cudnn",), "cpu", "is cudnn, a CUDA kernel, and the device is cpu. Set auto, flash or math."),
        (("short",), "sm_90", "is short, a CPU kernel, and the device is sm_90. Set auto or one of torch's."),
        (("short", "parallel=cp", "parallel.cp=2", "trainer.devices=2"), "cpu", "parallel.cp=2 splits them"),
        (("flash", "data.document_mask=true"), "sm_90", "takes no mask on CUDA; blocks of attention have one"),
        (("math", "model.layers=[gla,attention]"), "cpu", "which blocks of gla do not use"),
        (("math", "model=gemma2_2b"), "sm_90", "do not use"),
        (("flash",), "sm_90", None),
        (("flash", "data.document_mask=true"), "cpu", None),
        (("efficient", "data.document_mask=true"), "sm_80", None),
        (("flex", "data.document_mask=true"), "cpu", "is flex, a CUDA kernel, and the device is cpu."),
        (
            ("flex",),
            "sm_90",
            "data.document_mask or parallel.cp), and blocks of attention have none",
        ),
        (("flex", "data.document_mask=true", "trainer.compile=false"), "sm_90", "only in compiled blocks"),
        (("flex", "data.document_mask=true"), "sm_90", None),
        (("math",), "cpu", None),
        (("auto", "model.layers=[gla,attention]"), "cpu", None),
    ],
)
def test_unavailable_attention_kernels_are_refused(words, device, said):
    config = compose_config([f"trainer.attention_kernel={words[0]}", *words[1:]])
    problems = list(attention_kernel_problems(DerivedConfig(config, DEVICES[device])))
    assert len(problems) == (said is not None), problems
    if said is not None:
        assert said in problems[0].text
        assert problems[0].key == "trainer.attention_kernel"


def test_what_is_planned_of_a_mask_follows_the_kernel(tmp_path):
    """By pairs a bool of each in every block, and keys for all heads; by blocks neither: what plain attention keeps."""
    words = [
        "recipe=quickstart", "hardware=h100", "data.document_mask=true", "data.sequence_length=4096",
        "model.max_sequence_length=4096", "model.num_heads=8", "model.num_kv_heads=2",
    ]  # fmt: skip
    kept, seconds = {}, {}
    for name, more in {
        "flex": [], "efficient": ["trainer.attention_kernel=efficient"], "plain": ["data.document_mask=false"]
    }.items():  # fmt: skip
        facts = plan_facts(plan_of(compose_config([*words, *more, "cluster=h100_dgx"])))
        kept[name], seconds[name] = facts["memory_bytes"]["activations"], facts["step_seconds"]["total"]
    assert kept["flex"] == kept["plain"]
    model, rows = compose_config(words).model, compose_config(words).data.micro_batch_size
    pairs = 2 * rows * 4096**2
    keys = 2 * 2 * rows * 4096 * model.attention_head_dim * (8 - 2)
    assert kept["efficient"] - kept["flex"] == model.num_layers * (pairs + keys)
    assert seconds["flex"] == seconds["plain"] < seconds["efficient"]


def test_a_kernel_changes_the_hash_but_not_resuming_and_the_default_keeps_the_hash():
    plain, chosen = compose_config([]), compose_config(["trainer.attention_kernel=math"])
    assert config_hash(plain) != config_hash(chosen)
    assert differences_on_resume(plain, chosen) == {}
    values = plain.model_dump()
    del values["trainer"]["attention_kernel"]  # as an earlier version wrote it
    migrate(values)
    assert values["trainer"]["attention_kernel"] == "auto"
