"""Tensors that autograd saves in real steps, under layouts of 1 to 8 ranks, against `plan`'s bytes. 17 CPU seconds.

Saved tensors are counted by storage, without parameters, from the first forward pass of a step to its last backward
pass; their peak is compared with the plan's passes in the schedule's order. tests/model/test_kinds.py compares every
kind of block to the byte.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.linalg import local
from lightning_llm.parallel.apply import expensive_ops
from lightning_llm.plan.memory import OURS
from lightning_llm.plan.memory.rank_bytes import Stage
from lightning_llm.plan.resolve import Plan, plan_of
from lightning_llm.plan.stages import parts_of, passes_of
from tests.parallel.traced_run import Trace, difference, run_with, traced_run


class Held:
    """A tensor that autograd keeps, until it lets this object go."""

    def __init__(self, tensor: torch.Tensor, live: "Counter[int]"):
        self.tensor, self.live, self.storage = tensor, live, tensor.untyped_storage()._cdata
        live[self.storage] += 1

    def __del__(self) -> None:
        self.live[self.storage] -= 1


class Saved(pl.Callback):
    """Counts what autograd keeps in the first step: `most` bytes at once."""

    def __init__(self) -> None:
        self.live: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.most = 0
        self.kept: Kept | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.model = pl_module.model
            self.hooks = saved_tensors_hooks(self._keep, lambda held: held.tensor)
            self.hooks.__enter__()
            parallel = pl_module.config.parallel
            blocks = self.model.layers.items()
            if chosen := [block for key, block in blocks if parallel.checkpointing_of(int(key)) == "selective"]:
                self.kept = Kept(chosen)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.hooks.__exit__(None, None, None)
            if self.kept:
                self.most += self.kept.bytes // len(batch.tokens)  # of one micro-batch

    def _keep(self, tensor: torch.Tensor) -> Held:
        storage = tensor.untyped_storage()
        held = Held(tensor, self.live)
        weights = {local(parameter).untyped_storage()._cdata for parameter in self.model.parameters()}
        self.sizes[held.storage] = 0 if held.storage in weights else storage.nbytes()
        self.most = max(self.most, sum(self.sizes[key] for key, count in self.live.items() if count))
        return held


class Kept(TorchDispatchMode):
    """Counts the bytes of the blocks' outputs that selective checkpointing keeps."""

    def __init__(self, blocks: list[torch.nn.Module]) -> None:
        super().__init__()
        self.bytes, self.ops = 0, {op for block in blocks for op in expensive_ops(block)}
        for block in blocks:  # not its recomputation, which is no call of the module
            block.register_forward_pre_hook(lambda *_: self.__enter__() and None)
            block.register_forward_hook(lambda *_: self.__exit__(None, None, None))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in self.ops:
            self.bytes += sum(each.nbytes for each in (result if isinstance(result, tuple) else (result,)))
        return result


def measured(config: Config) -> list[int]:
    saved = Saved()
    run_with(config, saved)
    return of_all_ranks(saved)


def traced(config: Config) -> tuple[Trace, list[int]]:
    """Return (results that must not depend on recomputation, bytes saved by ranks)."""
    saved = Saved()
    return traced_run(config, saved, saves=False), of_all_ranks(saved)


def of_all_ranks(saved: Saved) -> list[int]:
    every = [saved.most]
    if dist.is_initialized() and dist.get_world_size() > 1:
        every *= dist.get_world_size()
        dist.all_gather_object(every, saved.most)
    return every


def planned(plan: Plan, pp_rank: int) -> int:
    """Return the bytes of saved tensors at their most, of a rank of the pipeline."""
    stages = [
        Stage.of(plan, part, OURS) for part in parts_of(plan.config.model, plan.config.parallel, plan.degrees, pp_rank)
    ]
    held, most = [0] * len(stages), 0
    for passed in passes_of(plan.config.parallel, plan.degrees.pp, pp_rank, plan.micro_batches):
        held[passed.stage // plan.degrees.pp] += 1 if passed.forward else -1
        saved = (count * (each.kept + each.copies + each.logits) for each, count in zip(stages, held, strict=True))
        most = max(most, sum(saved))
    return most


SHAPE = [
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_hidden_size=192",
    "model.head_dim=16",
]
DOCUMENTS, FULL = "data.document_mask=true", "parallel.activation_checkpoint=full"
SELECTIVE = "parallel.activation_checkpoint=selective"
LATENT = [
    "model.blocks={mla: {mixer: {kind: mla, q_rank: 32, kv_rank: 48, nope_dim: 8, rope_dim: 16, value_dim: 12}}}",
    "model.layers=[mla]",
]
CASES = [
    ("llama_tiny", "single", 1, "bf16", ["parallel.activation_checkpoint_layers=[none,full,full,none]"]),
    ("qwen3_tiny", "single", 1, "bf16", [SELECTIVE]),
    ("gemma2_tiny", "single", 1, "bf16", []),
    ("gla_tiny", "single", 1, "bf16", [DOCUMENTS]),
    ("llama_tiny", "tp", 2, "bf16", []),
    pytest.param("llama_tiny", "cp", 2, "bf16", LATENT, marks=pytest.mark.full),
    ("llama_tiny", "zero3", 2, "bf16", []),
    ("llama_tiny", "pp_interleaved", 2, "bf16", []),
]
"""One case per counted part; tests/model/test_kinds.py compares the parts of the blocks to the byte."""
COMBINED = [
    ("llama_tiny", "single", 1, "fp32", [FULL]),
    ("llama_tiny", "cp", 2, "bf16", []),
    ("llama_tiny", "pp", 2, "bf16", []),
    ("llama_tiny", "single", 1, "bf16", []),
    ("llama_tiny", "single", 1, "bf16", ["model.ffn_hidden_size=384"]),
    ("llama_tiny", "single", 1, "bf16", ["model.num_kv_heads=1", DOCUMENTS]),
    ("llama_tiny", "single", 1, "mxfp8", []),
    ("gpt3_345m", "single", 1, "bf16", ["data.sequence_length=1024", "model.bias=true"]),
    ("qwen3_tiny", "single", 1, "fp16", []),
    ("hybrid_tiny", "single", 1, "bf16", [FULL, "parallel.activation_checkpoint_every=2"]),
    ("qwen3_tiny", "tp", 2, "bf16", ["parallel.sequence_parallel=false"]),
    ("llama_tiny", "tp", 2, "bf16", [SELECTIVE]),
    ("gemma2_tiny", "fsdp_cp", 4, "fp32", []),
    ("gla_tiny", "fsdp_tp", 4, "bf16", []),
    ("gpt3_345m", "fsdp_pp_tp", 8, "bf16", [FULL]),
]
CASES += [pytest.param(*case, marks=pytest.mark.full) for case in COMBINED]


def words_of(small_run, folder: Path, model: str, layout: str, world: int, precision: str) -> list[str]:
    words = [each for each in small_run(folder) if not each.startswith("model")]
    words += [f"model={model}", *SHAPE, "model.num_layers=4", "model.vocab_size=320", f"precision={precision}"]
    words += ["precision.casts=eager", f"parallel={layout}", f"trainer.devices={world}", "data.sequence_length=256"]
    words += ["model.max_sequence_length=1024", "data.global_batch_size=8", "data.micro_batch_size=2"]
    return [*words, "schedule.warmup_steps=0", "trainer.validate_every_steps=null", "checkpoint.every_steps=null"]


@pytest.mark.parametrize(("model", "layout", "world", "precision", "more"), CASES)
def test_saved_tensors_are_those_of_the_plan(model, layout, world, precision, more, ranks, small_run, tmp_path):
    words = words_of(small_run, tmp_path, model, layout, world, precision)
    config = compose_config([*words, "trainer.max_steps=1", *more])
    plan, found = plan_of(config), ranks(world).call(measured, config)
    for rank, most in enumerate(found):
        assert most == pytest.approx(planned(plan, plan.degrees.coordinates(rank).pp), rel=0.02), rank


@pytest.mark.parametrize(
    ("layout", "modes"),
    [
        pytest.param("zero3", "[full,selective,none,full]", marks=pytest.mark.full),
        ("pp", "[full,none,none,full]"),
    ],
)
def test_what_blocks_recompute_over_ranks_saves_bytes_and_changes_no_bit(layout, modes, ranks, small_run, tmp_path):
    """Each stage looks up its own blocks in `parallel.activation_checkpoint_layers`, which is of the whole model."""
    runs = {}
    for name, word in (("without", "null"), ("with", modes)):
        words = words_of(small_run, tmp_path / name, "llama_tiny", layout, 2, "bf16")
        config = compose_config([*words, "trainer.max_steps=2", f"parallel.activation_checkpoint_layers={word}"])
        runs[name] = plan_of(config), *ranks(2).call(traced, config)
    (_, ours, saved), (plan, theirs, fewer) = runs["without"], runs["with"]
    assert difference(ours, theirs) is None
    for rank, (more, most) in enumerate(zip(saved, fewer, strict=True)):
        assert most == pytest.approx(planned(plan, plan.degrees.coordinates(rank).pp), rel=0.02), rank
        assert most < 0.8 * more
