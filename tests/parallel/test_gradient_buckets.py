"""Sums over ranks start within the backward pass, bucket by bucket, use the planned bytes and change no bit."""

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_llm.config.schema import ModelConfig, ParallelConfig, PrecisionConfig
from lightning_llm.dry_run.counting import Counting
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel import gradient_sync as gradient_buckets
from lightning_llm.parallel.apply import apply_parallel
from lightning_llm.parallel.cp import SequenceSharder
from lightning_llm.parallel.gradient_sync import BEGIN, END, Bucket, BucketReductions, GradientSync, buckets_of
from lightning_llm.plan.memory import buffers
from tests.parallel.rank_group import RankGroup
from tests.parallel.traced_run import layout_here, whole

FP32 = PrecisionConfig(name="fp32", compute_dtype="fp32")
MODEL = ModelConfig(
    name="tiny", vocab_size=128, num_layers=3, hidden_size=32, num_heads=2, num_kv_heads=2, ffn_hidden_size=128,
    max_sequence_length=16,
)  # fmt: skip
BUCKET_BYTES = 16384
"""The embedding, one linear of a feed-forward network, or an attention."""
COLLECTIVES = ("c10d::alltoall_base_", "c10d::_allgather_base_", "c10d::allreduce_", "c10d::broadcast_")


def batch_of(index: int) -> torch.Tensor:
    return torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(index))


def built(parallel: ParallelConfig, ranks_per_node: int | None = None) -> tuple[Decoder, GradientSync]:
    """Return the model and its sums, in buckets of `BUCKET_BYTES`."""
    with torch.device("meta"):
        model = Decoder(MODEL, torch.float32)
    layout = layout_here(parallel, ranks_per_node)
    with patch.object(gradient_buckets, "REPLICA_BUCKET_BYTES", BUCKET_BYTES):
        (sync,) = apply_parallel(model, layout, FP32, 0, MODEL.max_sequence_length, torch.device("cpu"))
    return model, sync


def profiled_step(parallel: ParallelConfig, micro_batches: int) -> tuple[dict[str, torch.Tensor], int, list[Any]]:
    """Return the whole gradients of a step of so many micro-batches per rank, the number of buckets, and the trace."""
    model, sync = built(parallel)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for micro_batch, index in enumerate(sync.layout.micro_batches(micro_batches)):
            tokens, last = batch_of(index), micro_batch == micro_batches - 1
            sync.before_backward(micro_batch, last)
            own, _, positions, _ = SequenceSharder(sync.layout)(tokens, tokens, None)
            loss = model(own, positions).square().sum()
            with record_function(f"backward {micro_batch}"):
                loss.backward()
            sync.after_backward(micro_batch, last)
        sync.finish()
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in seen.events()]
    return {name: whole(p.grad) for name, p in model.named_parameters()}, len(sync._buckets), spans


def begun_where(spans: list[Any], micro_batches: int) -> dict[str, int]:
    """Return how many collectives of buckets began in which part of a step; `unhidden` after all backward passes."""
    ours = [span for span in spans if span[0] in (BEGIN, END)]
    begun = [
        start for name, start, _ in spans if name in COLLECTIVES and any(each[1] < start < each[2] for each in ours)
    ]
    ((_, first, last),) = [span for span in spans if span[0] == f"backward {micro_batches - 1}"]
    embedding = max(start for name, start, _ in spans if name == "EmbeddingBackward0")
    assert first < embedding < last
    return {
        "too early": sum(time < first for time in begun),
        "before the embedding": sum(first < time < embedding for time in begun),
        "in the last pass": sum(first < time < last for time in begun),
        "unhidden": sum(last < time for time in begun),
    }


def alone(count: int) -> dict[str, torch.Tensor]:
    """Return the gradients of a step of one rank, each micro-batch by itself, summed by the tree's definition."""
    model, _ = built(ParallelConfig(name="single"))
    leaves = []
    for index in range(count):
        model.zero_grad(set_to_none=True)
        model(batch_of(index)).square().sum().backward()
        leaves.append({name: p.grad.clone() for name, p in model.named_parameters()})
    while len(leaves) > 1:
        pairs = zip(leaves[::2], leaves[1::2], strict=True)
        leaves = [{name: one[name] + other[name] for name in one} for one, other in pairs]
    return leaves[0]


LAYOUTS = [
    pytest.param(2, {"dp_replicate": 2}, 2, marks=pytest.mark.full),
    (4, {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2}, 2),
    pytest.param(4, {"dp_replicate": 4}, 4, marks=pytest.mark.full),
    pytest.param(4, {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 1}, 1, marks=pytest.mark.full),
]
"""Ranks, degrees, and micro-batches of a rank. The last bucket is the embedding's, with FSDP2's root where there is."""


@pytest.mark.parametrize(("world", "keys", "micro_batches"), LAYOUTS)
def test_sums_of_replicas_begin_within_the_last_backward_pass(world, keys, micro_batches, ranks):
    gradients, buckets, spans = ranks(world).call(profiled_step, ParallelConfig(name="b", **keys), micro_batches)
    begun = begun_where(spans, micro_batches)
    assert begun["too early"] == 0
    assert begun["before the embedding"] == 2 * (buckets - 1) - 1  # an all-to-all each, all but one's all-gather
    assert begun["in the last pass"] == 2 * buckets - 1
    assert begun["unhidden"] == 1
    expected = ranks(1).call(alone, micro_batches * world)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("axis", ["cp", pytest.param("tp", marks=pytest.mark.full)])
def test_norms_of_sharded_tensors_are_equal_up_to_rounding(axis, ranks):
    _, buckets, spans = ranks(2).call(profiled_step, ParallelConfig(name="b", **{axis: 2}), 2)
    begun = begun_where(spans, 2)
    assert begun["too early"] == begun["unhidden"] == 0
    assert begun["before the embedding"] == (buckets - 1 if axis == "cp" else 1)  # norms alone, in one bucket


def held(parallel: ParallelConfig, ranks_per_node: int) -> tuple[int, int]:
    """Return (peak bytes of buckets in addition to gradients, bytes of all gradients)."""
    model, sync = built(parallel, ranks_per_node)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    reducing = BucketReductions()
    with Counting(small_bytes=0) as counting:
        for parameter in model.parameters():
            parameter.grad.flatten()  # seen, and no more than that
        gradients = counting.held.now_bytes
        for bucket in sync._buckets:
            reducing.begin(bucket)
        reducing.end()
    assert counting.held.now_bytes == gradients
    return counting.held.peak_bytes - gradients, gradients


@pytest.fixture(scope="module")
def one_of_many() -> Iterator[Callable[[int], RankGroup]]:
    """Groups of fake ranks, by world size: their collectives send nothing."""
    groups: dict[int, RankGroup] = {}
    yield lambda world: groups.setdefault(world, RankGroup(world, fake=True))
    for group in groups.values():
        group.close()


HELD = [({"dp_replicate": 2}, 1), ({"cp": 2}, 1), ({"dp_replicate": 2, "cp": 2}, 1), ({"dp_replicate": 4}, 2)]
"""Degrees, and how many replicas a machine sums before it sends."""


@pytest.mark.parametrize(("keys", "together"), HELD)
def test_buckets_hold_what_is_planned(keys, together, one_of_many, monkeypatch):
    world = math.prod(keys.values())
    most, total = one_of_many(world).call(held, ParallelConfig(name="b", **keys), together if together > 1 else world)
    monkeypatch.setattr(buffers, "REPLICA_BUCKET_BYTES", BUCKET_BYTES)
    replicas = keys.get("dp_replicate", 1)
    assert most == buffers.bucket_bytes(total, BUCKET_BYTES, "cp" in keys, replicas, together)
    assert most < total


def test_buckets_are_full_homogeneous_and_in_the_order_of_their_last_gradient():
    """Hand-made buckets of 40 bytes: a gradient of another dtype or group between two others starts no new bucket."""

    def rows(flat: torch.Tensor) -> Iterator[Any]:
        yield from ()

    def columns(flat: torch.Tensor) -> Iterator[Any]:
        yield from ()

    sizes = {"a": 4, "wide": 3, "b": 5, "other": 1, "c": 1, "d": 11, "half": 6, "e": 2, "last": 2}
    dtypes = {"wide": torch.float64, "half": torch.bfloat16}
    parameters = {name: nn.Parameter(torch.zeros(size, dtype=dtypes.get(name))) for name, size in sizes.items()}
    names = {id(parameter): name for name, parameter in parameters.items()}
    others = {id(parameters["other"]), id(parameters["last"])}
    with patch.object(gradient_buckets, "REPLICA_BUCKET_BYTES", 40):
        found = buckets_of(list(parameters.values()), lambda each: [columns] if id(each) in others else [rows], 4)
    assert [[names[id(each)] for each in bucket.parameters] for bucket in found] == [
        ["wide"], ["a", "b", "c"], ["d"], ["half"], ["e"], ["other", "last"],
    ]  # fmt: skip
    assert [bucket.reductions for bucket in found] == [[rows]] * 5 + [[columns]]


@pytest.mark.parametrize(("multiple", "padded"), [(1, 19), (4, 20), (5, 20), (6, 24), (19, 19)])
def test_a_bucket_is_padded_to_the_multiple_and_split_again(multiple, padded):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (2,), (5,))]
    unused = nn.Parameter(torch.zeros(7))  # without a gradient
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    lengths = []

    def added(flat: torch.Tensor) -> Iterator[Any]:
        lengths.append(len(flat))
        flat += torch.arange(len(flat))
        yield from ()

    bucket = Bucket([*parameters[:1], unused, *parameters[1:]], [added, added], multiple)
    assert list(bucket.reduced()) == []
    assert lengths == [padded, padded]
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    assert flat.tolist() == [2 * place + (1 if place < 12 else 2 if place < 14 else 3) for place in range(19)]
    assert unused.grad is None
