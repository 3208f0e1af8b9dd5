"""trainer.attention_kernel: what is refused before a device is asked. 1 s."""

import pytest

from lightning_llm.config.compose import compose_config
from lightning_llm.config.identity import config_hash, differences_on_resume
from lightning_llm.config.schema.migrations import migrate
from lightning_llm.plan.attention_kernel import attention_kernel_problems
from lightning_llm.plan.resolve import Resolution
from lightning_llm.precision.native.capability import DEVICES


@pytest.mark.parametrize(
    ("words", "device", "said"),
    [
        (("cudnn",), "cpu", "is cudnn, a kernel of CUDA, and the device is cpu. Set auto, flash or math."),
        (("short",), "sm_90", "is short, a kernel for CPUs, and the device is sm_90. Set auto or one of torch's."),
        (("short", "parallel=cp", "parallel.cp=2", "trainer.devices=2"), "cpu", "parallel.cp=2 shares them"),
        (("flash", "data.document_mask=true"), "sm_90", "takes no mask on CUDA, and blocks of attention have one"),
        (("math", "model.layers=[gla,attention]"), "cpu", "blocks of gla have operations of their own"),
        (("math", "model=gemma2_2b"), "sm_90", "have operations of their own"),
        (("flash",), "sm_90", None),
        (("flash", "data.document_mask=true"), "cpu", None),
        (("efficient", "data.document_mask=true"), "sm_80", None),
        (("math",), "cpu", None),
        (("auto", "model.layers=[gla,attention]"), "cpu", None),
    ],
)
def test_what_cannot_be_had(words, device, said):
    config = compose_config([f"trainer.attention_kernel={words[0]}", *words[1:]])
    problems = list(attention_kernel_problems(Resolution(config, DEVICES[device])))
    assert len(problems) == (said is not None), problems
    if said is not None:
        assert said in problems[0].text
        assert problems[0].key == "trainer.attention_kernel"


def test_a_named_kernel_is_another_run_that_may_go_on_and_the_default_changes_no_hash():
    plain, chosen = compose_config([]), compose_config(["trainer.attention_kernel=math"])
    assert config_hash(plain) != config_hash(chosen)
    assert differences_on_resume(plain, chosen) == {}
    values = plain.model_dump()
    del values["trainer"]["attention_kernel"]  # as an earlier version wrote it
    migrate(values)
    assert values["trainer"]["attention_kernel"] == "auto"
