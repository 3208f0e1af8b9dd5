"""Native linears under tp, cp and pp: Transformer Engine's Python over stand-in kernels, against the emulation.

6 CPU seconds, 80 in full. Kernels that stand in cast as the emulation does, so curves must be equal to the last bit.
"""

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.run import ParallelConfig
from lightning_llm.parallel.operand_shards import shared_parts
from lightning_llm.precision.native import transformer_engine as te
from lightning_llm.precision.native.codes import check_native_casts
from lightning_llm.precision.native.decide import Capability
from tests.parallel.traced_run import layout_here, run_with
from tests.precision.native import real_engine, stub_kernels
from tests.precision.recipes import load
from tests.run_metrics import curve

CPU = torch.device("cpu")
FULL = pytest.mark.full
HOPPER, BLACKWELL = (9, 0), (10, 0)


@contextmanager
def library_on(device: tuple[int, int]):
    """Have Transformer Engine's Python, over stand-in kernels, find this GPU; yield a MonkeyPatch."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in real_engine.modules().items():
            patch.setitem(sys.modules, name, module)
        te.engine.cache_clear()
        real_engine.device(*device)
        real_engine.emulate_random_bits(patch)
        here = Capability.of_gpu(*device)
        patch.setattr("lightning_llm.plan.resolve.capability_here", lambda accelerator: here)
        stub_kernels.LOG.clear()
        yield patch


def run_on(device: tuple[int, int] | None, config: Config) -> tuple[list[Any] | None, int]:
    """Return a run's curve (on rank 0), and how many GEMMs Transformer Engine's Python asked for on a GPU, None: none.

    Its kernels are the tests' own (`tests/precision/native/real_engine.py`).
    """
    if device is None:
        stub_kernels.LOG.clear()
        run_with(config, saves=False)
    else:
        with library_on(device):
            run_with(config, saves=False)
    first = torch.distributed.get_rank() == 0
    gemms = [call for call in stub_kernels.LOG if isinstance(call, stub_kernels.Gemm)]
    return curve(Path(config.run.dir)) if first else None, len(gemms)


@pytest.mark.parametrize(
    ("recipe", "device", "words"),
    [
        pytest.param("mxfp8", BLACKWELL, ["parallel.tp=2", "parallel.cp=2"], marks=FULL),
        pytest.param("fp8_delayed", HOPPER, ["parallel.tp=2", "parallel.cp=2"], marks=FULL),
        pytest.param("fp8_subchannel", HOPPER, ["parallel.tp=2", "parallel.cp=2"], marks=FULL),
        pytest.param("fp8_current", HOPPER, ["parallel.tp=2", "parallel.cp=2"], marks=FULL),
        pytest.param("nvfp4", BLACKWELL, ["parallel.tp=2", "parallel.cp=2"], marks=FULL),
        pytest.param("fp8_current", HOPPER, ["parallel=fsdp_tp"], marks=FULL),
        pytest.param("nvfp4", BLACKWELL, ["parallel=pp_tp", "parallel.activation_checkpoint=full"], marks=FULL),
        pytest.param("nvfp4", BLACKWELL, ["parallel=pp_interleaved"], marks=FULL),
    ],
)
def test_ranks_that_cast_their_parts_natively_train_as_emulated_ones(recipe, device, words, ranks, small_run, tmp_path):
    """On 4 ranks, and 2 for a pipeline alone. test_shard_operands.py shows that emulated operands are the whole's."""
    world = 2 if words == ["parallel=pp_interleaved"] else 4
    words = [f"precision={recipe}", *words, f"trainer.devices={world}", "precision.casts=eager"]
    words += ["trainer.compile=false"]  # a GPU would compile, the emulation does not
    words += ["model.hidden_size=256", "model.num_heads=2", "model.num_kv_heads=2", "model.ffn_hidden_size=256"]
    words += ["data.sequence_length=512", "trainer.max_steps=2", "model.bias=true"]
    words += [f"model.num_layers={4 if 'pp' in words[1] else 1}", "data.global_batch_size=4"]
    words += ["trainer.validate_every_steps=null", "precision.modules.first_blocks_high_precision=0"]
    words += ["precision.modules.last_blocks_high_precision=0"]
    made = {}
    for gpu in (device, None):
        config = compose_config(small_run(tmp_path / str(gpu), *words))
        made[gpu] = ranks(world).call(run_on, gpu, config)
    (native, gemms), (emulated, none) = made[device], made[None]
    assert native == emulated
    assert (gemms > 0, none) == (True, 0)


def problems_at_the_start(
    recipe: str, device: tuple[int, int], parallel: ParallelConfig, bias: bool, fault: str | None
) -> list[str]:
    """Return the problems that rank 0 finds when a run starts; all ranks must call it."""
    layout = layout_here(parallel)
    with library_on(device) as patch:
        if fault == "group withdrawn":  # the library's linear does as it would without our change
            share = te.share_amaxes

            def withdrawn(kernel, groups):
                share(kernel, groups)
                for quantizer in te.quantizers_of(kernel).values():
                    vars(quantizer).pop("parent_quantizer", None)

            patch.setattr(te, "share_amaxes", withdrawn)
        if fault == "own amax":  # kernels that ask for the group, and reduce nothing
            patch.setattr(stub_kernels, "_amax", lambda x, group: stub_kernels.tensor_amax(x))
        try:
            check_native_casts(load(recipe), CPU, bias, shared_parts(layout))
        except ConfigError as error:
            return [each.text for each in error.problems]
    return []


@pytest.mark.parametrize(("recipe", "device", "bias"), [("fp8_current", HOPPER, True), ("nvfp4", BLACKWELL, False)])
def test_casts_of_parts_are_checked_before_the_first_step(recipe, device, bias, ranks):
    """The kernel that casts dY and sums it for the bias takes the group, too."""
    parallel = compose_config(["parallel=tp", "trainer.devices=2"]).parallel
    assert ranks(2).call(problems_at_the_start, recipe, device, parallel, bias, None) == []
    found = ranks(2).call(problems_at_the_start, recipe, device, parallel, bias, "own amax")
    assert {text.split("recipe's: ")[1].split()[0] for text in found} == {
        "fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x",
    }  # fmt: skip
    found = ranks(2).call(problems_at_the_start, recipe, device, parallel, bias, "group withdrawn")
    roles = [text.split("recipe's: ")[1].split(":")[0] for text in found]
    assert roles == ["dy", "x"]  # of column and row linears: the library withdraws no group of a weight
    assert all("is cast by its own amax, instead of the whole tensor's" in text for text in found)
