"""Bytes that a rank sends in a step, and bytes of its tensors, against the figures of `plan`. 20 seconds.

The formulas themselves are compared with those of ZeRO in tests/plan/test_plan_layouts.py.
"""

import math
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.optim import ParameterShard
from lightning_llm.dry_run.counting import SentBytes
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.rope import rope_tables
from lightning_llm.model.structure import mixer_of
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.optim.optimizer import role_of
from lightning_llm.parallel.apply import expensive_ops
from lightning_llm.parallel.dp_shard import sharded_modules
from lightning_llm.parallel.tree import TreeSum
from lightning_llm.plan.degrees import resolve_degrees
from lightning_llm.plan.memory.activations import selective_bytes_per_token
from lightning_llm.plan.memory.rank_bytes import memory_bytes, peak_memory_pp_rank
from lightning_llm.plan.memory.units import tree_buffers, units_of
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.traffic import bytes_sent
from tests.parallel.traced_run import run_with

RANKS = 4
TURNS = {"tree": 4, "native": 2}
"""Micro-batches of a rank: the fewest that a tree keeps a sum of, and that one rank adds up by itself."""
HELD = ("parameters", "gradients", "optimizer", "unsharded_gradients", "tree_gradients", "gathered")


class SentHere(SentBytes):
    """The dry run's counter on real ranks; also keeps the size of the largest reduced tensor."""

    largest_reduced = 0

    def _count(self, kind: str, tensors: Any, group: dist.ProcessGroup) -> None:
        super()._count(kind, tensors, group)
        large = max((tensor.nbytes for tensor in _tensors(tensors)), default=0)
        if large > self.small_bytes and kind != "all_gather":
            self.largest_reduced = max(self.largest_reduced, large)


class Sent(TorchDispatchMode):
    """Counts bytes a rank sends to others, per kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = SentHere(small_bytes=64)  # the step's counts and flags are no gradients or weights

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.counted.see(function, args, result)
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


class Measure(pl.Callback):
    """Measures the second step, which begins with a state: `held` by kind in bytes, the largest that was seen."""

    def __init__(self) -> None:
        self.sent = Sent()
        self.held: Counter[str] = Counter()
        self._waiting: dict[int, int] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        assert bool(sharded_modules(pl_module.model)) == trainer.strategy.layout.shards  # what plan counts with
        pl_module.model.register_forward_hook(self._after_forward)
        self._push = TreeSum.push
        measure = self

        def push(sums: TreeSum, node: list[torch.Tensor], level: int) -> None:
            measure._push(sums, node, level)
            measure._waiting[id(sums)] = _bytes(tensor for _, each in sums._nodes for tensor in each)
            measure._see("tree_gradients", sum(measure._waiting.values()))

        TreeSum.push = push

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        TreeSum.push = self._push

    def _see(self, kind: str, size: int) -> None:
        self.held[kind] = max(self.held[kind], size)

    def _after_forward(self, model: Any, *_: Any) -> None:
        modules = sharded_modules(model)
        if modules:
            whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
            self._see("gathered", sum(p.untyped_storage().nbytes() for p in whole))
        groups = [group for each in modules for group in each._get_fsdp_state()._fsdp_param_groups]
        parameters = [p for group in groups for p in group.fsdp_params]  # a stage's root may have none
        waiting = [p.unsharded_accumulated_grad for p in parameters]  # since torch 2.15 the same tensors as below
        waiting += [p._unsharded_param.grad for p in parameters]
        self._see("unsharded_gradients", _bytes({id(each): each for each in waiting if each is not None}.values()))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._waiting.clear()
            self.sent.__enter__()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        parameters = list(pl_module.model.parameters())
        self.held["parameters"] = _bytes(_local(p) for p in parameters)
        self.held["gradients"] = _bytes(_local(p.grad) for p in parameters)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.sent.__exit__(None, None, None)
        state = trainer.optimizers[0].state.values()
        moments = [value for each in state for key, value in each.items() if key.startswith("exp_avg")]
        self.held["optimizer"] = _bytes(_local(moment) for moment in moments)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def measured(config: Config) -> tuple[dict[str, int], dict[str, int], int]:
    measure = Measure()
    run_with(config, measure, saves=False)
    sent = measure.sent.counted
    return sent.by_kind(sent.bytes), dict(measure.held), sent.largest_reduced


def words_of(layout: str, reduction: str, precision: str, *more: str) -> list[str]:
    return [
        f"parallel={layout}", f"parallel.reduction={reduction}", f"precision={precision}", f"trainer.devices={RANKS}",
        "data.micro_batch_size=1", f"data.global_batch_size={RANKS * TURNS[reduction]}", "trainer.max_steps=2",
        "schedule.warmup_steps=1", "trainer.validate_every_steps=null", "checkpoint.every_steps=null",
        "model.vocab_size=384",
        "model.ffn_hidden_size=258",  # no multiple of the ranks: rows are padded
        *more,
    ]  # fmt: skip


IN_FP32 = [("zero1", "tree", "fp32", "false"), ("zero3", "tree", "fp32", "true")]
CASES = [
    pytest.param(layout, reduction, "bf16", tied, marks=pytest.mark.full)
    if (layout, reduction, "fp32") in [case[:3] for case in IN_FP32]  # pairs of values that other cases have
    or (layout, reduction) in [("zero1", "native"), ("hsdp", "native"), ("zero2", "native"), ("ddp", "tree")]
    else (layout, reduction, "bf16", tied)
    for layout, tied in (("ddp", "false"), ("zero1", "true"), ("zero2", "false"), ("zero3", "false"), ("hsdp", "true"))
    for reduction in ("tree", "native")
] + IN_FP32


@pytest.mark.parametrize(("layout", "reduction", "precision", "tied"), CASES)
def test_bytes_sent_and_held_are_those_of_the_plan(layout, reduction, precision, tied, ranks, small_run, tmp_path):
    words = words_of(layout, reduction, precision, f"model.tie_embeddings={tied}")
    config = compose_config(small_run(tmp_path, *words))
    sent, held, largest = ranks(RANKS).call(measured, config)
    assert sent == {kind: size for kind, size in bytes_sent(plan_of(config)).items() if size}
    plan = memory_bytes(plan_of(config))
    if config.parallel.zero_stage == 3:  # measured between forward and backward, when no block is gathered
        block = units_of(config.model).blocks[0].whole(resolve_degrees(config.parallel, RANKS).dp_shard)
        plan["gathered"] -= 2 * block * DTYPE_BYTES[precision]
    assert {kind: held.get(kind, 0) for kind in HELD} == {kind: plan[kind] for kind in HELD}
    if layout != "hsdp":  # which reduces two sorts of things
        own_part = largest // RANKS if (layout, reduction) == ("ddp", "tree") else 0  # of the sum of a bucket
        assert plan["communication"] == 2 * largest + own_part


QK_NORM = ["model.layers=[gla, qk_norm_attention]"]
LATENT = [
    "model.blocks={mla: {mixer: {kind: mla, q_rank: 32, kv_rank: 48, nope_dim: 8, rope_dim: 16, value_dim: 12}}}",
    "model.layers=[mla]",
]
CUT = [
    ("tp", 2, "bf16", ["model.layers=[gla, attention]"]),
    pytest.param(
        "tp",
        2,
        "bf16",
        ["parallel.sequence_parallel=false", "parallel.activation_checkpoint=full", *QK_NORM],
        marks=pytest.mark.full,
    ),
    ("fsdp_tp", 4, "bf16", ["model.norm=layernorm", "model.bias=true", "model.position=learned"]),
    ("fsdp_cp_tp", 4, "fp32", ["model.tie_embeddings=true", "parallel.activation_checkpoint=full"]),
    pytest.param("fsdp_cp", 4, "bf16", [], marks=pytest.mark.full),
    ("cp", 2, "bf16", ["parallel.activation_checkpoint=full"]),
    pytest.param("fsdp_cp_tp", 4, "bf16", LATENT, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "world", "precision", "more"), CUT)
def test_bytes_of_cut_weights_and_shared_sequences(layout, world, precision, more, ranks, small_run, tmp_path):
    words = words_of(layout, "tree", precision, "model.num_kv_heads=2", f"trainer.devices={world}", *more)
    words += ["data.global_batch_size=4", "data.sequence_length=64"]
    config = compose_config(small_run(tmp_path, *words))
    sent, held, _ = ranks(world).call(measured, config)
    assert sent == {kind: size for kind, size in bytes_sent(plan_of(config)).items() if size}
    plan = memory_bytes(plan_of(config))
    kinds = ("parameters", "gradients", "optimizer", "tree_gradients")
    assert {kind: held.get(kind, 0) for kind in kinds} == {kind: plan[kind] for kind in kinds}


STAGED = [
    ("pp", 2, "bf16", ["model.tie_embeddings=true"]),
    pytest.param("pp_interleaved", 2, "fp32", [], marks=pytest.mark.full),
    ("fsdp_pp", 4, "bf16", []),
    pytest.param("pp_tp", 4, "fp32", ["model.num_kv_heads=2"], marks=pytest.mark.full),
]


def measured_on(config: Config, rank: int) -> tuple[dict[str, int], dict[str, int], int]:
    found = [measured(config)]
    dist.broadcast_object_list(found, src=rank)
    return found[0]


@pytest.mark.parametrize(("layout", "world", "precision", "more"), STAGED)
def test_bytes_of_a_pipelines_heaviest_stage(layout, world, precision, more, ranks, small_run, tmp_path):
    words = words_of(layout, "tree", precision, f"trainer.devices={world}", "model.num_layers=4", *more)
    config = compose_config(small_run(tmp_path, *words, "data.global_batch_size=4", "data.sequence_length=64"))
    degrees = resolve_degrees(config.parallel, world)
    rank = peak_memory_pp_rank(plan_of(config)) * world // degrees.pp
    sent, held, _ = ranks(world).call(measured_on, config, rank)
    assert sent == {kind: size for kind, size in bytes_sent(plan_of(config)).items() if size}
    plan = memory_bytes(plan_of(config))
    kinds = ("parameters", "gradients", "optimizer", "tree_gradients")
    assert {kind: held.get(kind, 0) for kind in kinds} == {kind: plan[kind] for kind in kinds}


@pytest.mark.parametrize("model", ["llama_tiny", "gpt3_345m", "llama_1b", "qwen3_tiny", "gemma2_tiny", "hybrid_tiny"])
def test_units_are_the_groups_that_are_sharded(model):
    """Shapes and roles by formula against the parameters of the model, group by group."""
    config = compose_config([f"model={model}"]).model
    with torch.device("meta"):
        decoder = Decoder(config)
    shards = {
        name: ParameterShard(p.shape[0], p[0].numel(), role_of(name, p.ndim)) for name, p in decoder.named_parameters()
    }
    units = units_of(config)

    def of(*prefixes):
        return Counter(shard for name, shard in shards.items() if name.startswith(prefixes))

    for index in range(config.num_layers):
        assert Counter(units.blocks[index].parameters) == of(f"layers.{index}.")
    tied = config.tie_embeddings
    assert Counter(units.head.parameters) == of("head")
    assert Counter(units.embedding.parameters) == (Counter() if tied else of("embedding"))
    assert Counter(units.root.parameters) == of("norm", "position_embedding", *(["embedding"] if tied else []))


@pytest.mark.parametrize("micro_batches", range(1, 33))
def test_the_tree_needs_so_many_buffers(micro_batches):
    sums, most = TreeSum(), 0
    for pair in range((micro_batches - 1) // 2):
        sums.push([torch.full((1,), float(pair))], level=1)
        most = max(most, len(sums._nodes))
    assert tree_buffers(micro_batches) == most
    assert most <= max(0, math.ceil(math.log2(micro_batches)) - 1)


class Kept(TorchDispatchMode):
    """Counts bytes that operations put out which selective checkpointing keeps."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.bytes, self.kept = 0, expensive_ops(block)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in self.kept:
            self.bytes += sum(t.nbytes for t in _tensors(list(result) if isinstance(result, tuple) else result))
        return result


@pytest.mark.parametrize("model", ["llama_tiny", "gpt3_345m", "qwen3_tiny", "gemma2_tiny", "gla_tiny", "mla"])
def test_selective_checkpointing_keeps_what_is_planned(model):
    words = ["model.num_layers=1", "precision=bf16", "model.max_sequence_length=1024", "data.sequence_length=1024"]
    config = compose_config(["model=llama_tiny", *LATENT, *words] if model == "mla" else [f"model={model}", *words])
    batch, length = 1, 1024  # beyond what short_attention takes
    decoder = Decoder(config.model, torch.bfloat16)
    x = torch.randn(batch, length, config.model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    rotary = config.model.position == "rope" and model != "gla_tiny"
    width = mixer_of(config.model, 0).rope_width(config.model)
    rope = rope_tables(config.model, torch.arange(length), width) if rotary else None
    block = decoder.blocks["layers.0"]
    with Kept(block) as kept:
        block(x, rope, None)
    assert kept.bytes == batch * length * selective_bytes_per_token(config, 0)
