"""The kernels that a run's attention takes on this rank's device, and the line that tells them."""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.model.attention.kernel_choice import FLEX, AttentionShape, NoKernelError, attention_by, kernel_of
from lightning_llm.model.attention.kinds import AttentionSpec
from lightning_llm.model.dtypes import DTYPES
from lightning_llm.plan.attention_kernel import KEY, is_masked, mixers_of
from lightning_llm.plan.resolve import Plan


def attention_kernels(plan: Plan, device: torch.device) -> dict[str, str]:
    """Return the kernel of each kind of block with softmax attention, as `trainer.attention_kernel` has it here.

    Raises:
        ConfigError: the kernel that is asked for does not run on `device` with these heads, for torch's reasons.
    """
    config, degrees, found = plan.config, plan.degrees, dict[str, str]()
    model, name = config.model, config.trainer.attention_kernel
    for layer, mixer in mixers_of(config).items():
        if not isinstance(mixer, AttentionSpec):
            continue
        if not mixer.takes_kernels:
            found[layer] = "operations of its own"
            continue
        shape = AttentionShape(
            model.num_heads // degrees.tp, model.num_kv_heads // degrees.tp, model.attention_head_dim,
            config.data.sequence_length, is_masked(mixer, config, degrees.cp, device.type == "cuda"),
            DTYPES[config.precision.compute_dtype], shared=degrees.cp > 1, compiled=plan.compiled,
        )  # fmt: skip
        try:
            found[layer] = kernel_of(name, shape, device)
        except NoKernelError as error:
            text = f"is {name}, and blocks of {layer} cannot have it on {device}: {error} Set auto, or another kernel."
            raise ConfigError(Problem(KEY, text)) from error
    return found


def attention_of(plan: Plan, kernels: Mapping[str, str]) -> AbstractContextManager[None]:
    """Return the context of the run's steps, in which blocks have the attention that `attention_kernels` found."""
    return attention_by(plan.config.trainer.attention_kernel, by_blocks=FLEX in kernels.values())


def kernel_line(kernels: dict[str, str], name: str) -> str | None:
    """Return the opening line on `kernels`; None where no block has softmax attention."""
    if not kernels:
        return None
    taken = set(kernels.values())
    each = taken.pop() if len(taken) == 1 else ", ".join(f"{layer}: {kernel}" for layer, kernel in kernels.items())
    return f"kernel attention by {each} ({KEY}={name})"
