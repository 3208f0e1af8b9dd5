"""What a rank sends in a step, and what it holds, against the formulas of ZeRO (arXiv 1910.02054, sections 5 and 7)."""

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from traced_run import run_with

from lightning_llm.compose import compose_config
from lightning_llm.model.flops import count_parameters
from lightning_llm.schema import Config

RANKS, TURNS = 4, 2


class Sent(TorchDispatchMode):
    """Counts bytes a rank sends to others, per kind of collective, as a ring would."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if name.startswith("c10d::"):
            large = max((t.nbytes for t in _tensors(args)), default=0)
            if large > 64:  # the step's counts and flags are no gradients or weights
                self.bytes[name.removeprefix("c10d::").strip("_").split(".")[0]] += large * (RANKS - 1) // RANKS
        return function(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


class Measure(pl.Callback):
    """Measures the third step."""

    def __init__(self) -> None:
        self.sent, self.gathered = Sent(), 0
        self.held: dict[str, int] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.model.register_forward_hook(self._after_forward)

    def _after_forward(self, model: Any, *_: Any) -> None:
        whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
        self.gathered = sum(p.numel() for p in whole)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.sent.__enter__()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        parameters = list(pl_module.model.parameters())
        self.held = {
            "parameters": sum(_local(p).numel() for p in parameters),
            "gradients": sum(_local(p.grad).numel() for p in parameters),
        }

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.sent.__exit__(None, None, None)
        state = trainer.optimizers[0].state.values()
        moments = [value for each in state for key, value in each.items() if key.startswith("exp_avg")]
        self.held["optimizer"] = sum(_local(moment).numel() for moment in moments)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measured(config: Config) -> tuple[dict[str, int], dict[str, int], int]:
    measure = Measure()
    run_with(config, measure)
    return dict(measure.sent.bytes), measure.held, measure.gathered


@pytest.mark.parametrize("reduction", ["tree", "native"])
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3"])
def test_bytes_sent_and_held_are_those_of_zero(layout, reduction, ranks, small_run, tmp_path):
    config = compose_config(
        small_run(
            tmp_path,
            f"parallel={layout}",
            f"parallel.reduction={reduction}",
            f"trainer.devices={RANKS}",
            "data.micro_batch_size=1",
            f"data.global_batch_size={RANKS * TURNS}",
            "trainer.max_steps=4",
            "trainer.validate_every_steps=null",
            "model.vocab_size=384",
            "checkpoint.every_steps=null",
            "model.tie_embeddings=false",
        )
    )
    sent, held, gathered = ranks(RANKS).call(measured, config)
    psi = count_parameters(config.model, padded=True).total
    embedding = config.model.padded_vocab_size * config.model.hidden_size
    once = 4 * psi * (RANKS - 1) // RANKS  # every parameter, in fp32, once around the ring
    blocks = psi - 2 * embedding - config.model.hidden_size
    scatters = {"ddp": 1, "zero1": 1, "zero2": TURNS, "zero3": TURNS}[layout]
    gathers = {
        "ddp": once, "zero1": once, "zero2": once,
        # every micro-batch gathers all, and the blocks again to go back; the head and the last norm stay in between
        "zero3": TURNS * (once + 4 * blocks * (RANKS - 1) // RANKS),
    }[layout]  # fmt: skip
    if (layout, reduction) == ("ddp", "native"):
        assert sent == {"allreduce": once}  # of which a ring sends each byte twice
    else:
        assert sum(sent.values()) == scatters * once + gathers, sent
    shards = 1 if layout == "ddp" else RANKS
    assert held == {"parameters": psi // shards, "gradients": psi // shards, "optimizer": 2 * psi // shards}
    if layout != "ddp":
        assert gathered == (psi - blocks - embedding if layout == "zero3" else psi)
