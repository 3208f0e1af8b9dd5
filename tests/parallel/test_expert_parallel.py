"""Ranks that divide experts (parallel.ep) train to the bits of one rank with all of them."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_llm.base.errors import ConfigError
from lightning_llm.callbacks.quantisation_health import QuantisationHealth
from lightning_llm.config.compose import compose_config
from lightning_llm.parallel.ep import SenderSums
from lightning_llm.plan.check import check_config
from lightning_llm.plan.degrees import Degrees
from lightning_llm.train.spikes import NonFiniteError
from tests.parallel.layout_matrix import Case
from tests.parallel.test_experts_over_ranks import MOE
from tests.parallel.traced_run import difference, run_with, traced_run, unsaved_run

EQUAL = [
    (Case("ddp", 2, 4, "bf16"), 2, []),
    (Case("zero2", 2, 4, "fp8_delayed", "full"), 2, []),
    *(
        pytest.param(Case(layout, 4, 8, precision, mode), ep, [], marks=pytest.mark.full)
        for layout, ep, mode in (
            ("ddp", 4, "selective"), ("ddp", 2, "none"), ("zero1", 2, "none"), ("zero2", 4, "full"),
            ("zero2", 2, "none"), ("zero3", 2, "full"), ("hsdp", 2, "none"), ("ddp_pp", 2, "selective"),
            ("fsdp_pp", 2, "none"),
        )
        for precision in ("fp32", "bf16", "nvfp4", "mxfp4_sr", "mxfp8")
    ),
    *(
        pytest.param(Case(layout, 4, 8, "bf16"), 2, ["optim=muon"], marks=pytest.mark.full)
        for layout in ("ddp", "zero1", "zero3")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("case", "ep", "more"), EQUAL, ids=str)
def test_ranks_that_divide_experts_train_to_the_bits_of_one(case, ep, more, to_the_bits):
    """Losses, routers' figures, gradients with those of the balance loss, weights, and biases of the routers."""
    to_the_bits(case, *MOE, "trainer.max_steps=2", *more, ours=[f"parallel.ep={ep}"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "world", "precision", "more"),
    [
        ("fsdp_cp", 4, "bf16", ["parallel.activation_checkpoint=full"]),
        ("fsdp_cp", 4, "fp32", ["parallel.zero_stage=1", "optim=muon"]),
        ("ddp", 4, "nvfp4", ["parallel.cp=2"]),
        ("cp", 2, "fp8_delayed", []),
        ("cp", 4, "bf16", ["parallel.zero_stage=2", "parallel.dp_replicate=2", "parallel.cp=2"]),
    ],
    ids=str,
)
def test_ranks_that_share_sequences_share_experts_to_the_bits(layout, world, precision, more, ranks, matrix_run):
    """Each rank's part of a sequence is a sender of its own, so that `ep` changes nothing."""
    words = ["trainer.max_steps=2", "model.num_heads=2", "model.num_kv_heads=2", *MOE, *more]
    degrees = [1, 2] if "parallel.zero_stage=2" in more or world == 2 else [1, 2, 4]
    runs = [(layout, world, 8, precision, *words, f"parallel.ep={ep}") for ep in degrees]
    alone, *others = [ranks(world).call(unsaved_run, matrix_run(*each)) for each in runs]
    assert [difference(each, alone) for each in others] == [None] * len(others)


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "eps", "optim"),
    [
        ("bf16", (2, 1, 4), "adamw"),
        ("bf16", (1, 1, 1), "adamw"),
        ("bf16", (2, 2, 4), "muon"),
        ("nvfp4", (1, 2, 2), "adamw"),
        ("fp8_delayed", (2, 1, 4), "adamw"),
        ("fp8_delayed", (1, 1, 1), "adamw"),
        ("fp8_delayed", (2, 2, 4), "adamw8bit"),
    ],
)
def test_checkpoints_move_between_degrees(precision, eps, optim, ranks, small_run, tmp_path):
    """A run under ZeRO-2, continued under ZeRO-3, then under DDP, each with another ep: the bits of one rank."""

    def words(folder, layout, world, *more):
        return compose_config(
            small_run(
                folder, f"parallel={layout}", f"trainer.devices={world}", f"precision={precision}",
                f"optim={optim}", "precision.casts=eager", "data.micro_batch_size=1", "data.global_batch_size=4",
                *MOE, *more,
                "data.sequence_length=64", "schedule.total_steps=6", "trainer.validate_every_steps=2",
            )
        )  # fmt: skip

    whole = ranks(1).call(traced_run, words(tmp_path / "whole", "single", 1, "trainer.max_steps=6"))
    for (layout, world, steps), ep in zip((("zero2", 2, 2), ("zero3", 2, 4), ("ddp", 4, 6)), eps, strict=True):
        more = [f"parallel.ep={ep}", f"trainer.max_steps={steps}", "resume=auto"]
        parts = ranks(world).call(traced_run, words(tmp_path / "parts", layout, world, *more))
    whole["gradients"] = parts["gradients"] = []  # those of a run's own first steps
    assert difference(whole, parts) is None


class SpoilRankOne(pl.Callback):
    """Makes the second rank's first attention, before all experts, return NaN."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if torch.distributed.get_rank() == 1:
            layer = pl_module.model.get_submodule("layers.0.attention.o_proj")
            layer.register_forward_hook(lambda *call: call[-1] * torch.nan)


def spoiled_run(config: Any) -> str:
    try:
        run_with(config, SpoilRankOne(), QuantisationHealth(), saves=False)
    except NonFiniteError as error:
        return str(error)
    return "trained"


@pytest.mark.full
def test_the_origin_of_nan_is_the_senders(ranks, matrix_run):
    """The first rank computes rows of the second's micro-batch, in experts that come after the NaN."""
    said = ranks(2).call(spoiled_run, matrix_run("ddp", 2, 2, "bf16", *MOE, "trainer.max_steps=1", "parallel.ep=2"))
    assert "first appeared in layers.0.attention.o_proj, product of fprop, of micro-batch 1 of" in said


class Collapse(pl.Callback):
    """Makes routers choose the first four experts alone, which the first of two ranks holds."""

    @torch.no_grad()
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for name, parameter in pl_module.model.named_parameters():
            if name.endswith("router.correction"):
                parameter[:4] = 50.0


def collapsed_run(config: Any) -> Any:
    return traced_run(config, Collapse(), saves=False)


@pytest.mark.full
def test_a_rank_without_rows_takes_part_in_the_backward_pass(ranks, matrix_run):
    words = [*MOE, "trainer.max_steps=2", "parallel.timeout_seconds=60"]
    alone = ranks(1).call(collapsed_run, matrix_run("single", 1, 4, "nvfp4", *words))
    ours = ranks(2).call(collapsed_run, matrix_run("ddp", 2, 4, "nvfp4", *words, "parallel.ep=2"))
    assert difference(ours, alone) is None


def test_gradients_of_senders_wait_for_the_last_micro_batch():
    """The tree over 2 senders x 3 micro-batches, each sender's in a row, adds in this order in fp32."""
    leaves = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    sums, first, second = SenderSums(2), leaves[0], leaves[1]
    for index in range(2):
        assert sums.add(leaves[:, index].clone().unbind(0), closes=False) is None
    total = sums.add(leaves[:, 2].clone().unbind(0), closes=True)
    assert torch.equal(total, ((first[0] + first[1]) + first[2]) + ((second[0] + second[1]) + second[2]))


def test_groups_of_experts_fold_into_the_data_parallel_ranks():
    """Two stages of 4 ranks, of which 2 share experts; replicas share none where there are shards."""
    degrees = Degrees(pp=2, dp_shard=4, ep=2)
    assert (degrees.world, degrees.dp, degrees.edp) == (8, 4, 2)
    assert degrees.groups("ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert degrees.groups("edp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert Degrees(dp_replicate=2, dp_shard=2, ep=2).groups("ep") == [[0, 1], [2, 3]]
    assert Degrees(dp_replicate=4, ep=4).groups("ep") == [[0, 1, 2, 3]]


def test_groups_of_experts_fold_into_the_ranks_of_a_sequence_first():
    """2 data-parallel ranks of 4 that share sequences: 2 experts' ranks are within those 4, 8 are all."""
    degrees = Degrees(dp_shard=2, cp=4, ep=2)
    assert (degrees.edp, degrees.ecp, degrees.of_experts) == (4, 2, Degrees(dp_shard=2, cp=2))
    assert degrees.groups("ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert degrees.groups("edp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert degrees.groups("ecp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    whole = Degrees(dp_replicate=2, cp=4, ep=8)
    assert (whole.edp, whole.ecp, whole.of_experts) == (1, 1, Degrees())
    assert whole.groups("ep") == [list(range(8))]


REFUSED = [
    (["parallel=zero2", "trainer.devices=4", "parallel.ep=3"], ["4 = 1 x 3 + 1", "8 = 2 x 3 + 2"]),
    (["parallel=hsdp", "parallel.dp_shard=2", "trainer.devices=4", "parallel.ep=4"], ["replicas do not share experts"]),
    (["parallel=fsdp_cp", "parallel.cp=4", "trainer.devices=8", "parallel.ep=3"], ["2 x 4 = 8 (8 = 2 x 3 + 2)"]),
    (["parallel=fsdp_cp", "parallel.cp=4", "trainer.devices=24", "parallel.ep=6"], ["cp = 4 or be a multiple of it"]),
    (
        [
            "parallel=cp",
            "parallel.cp=2",
            "parallel.dp_replicate=2",
            "parallel.zero_stage=2",
            "trainer.devices=4",
            "parallel.ep=4",
        ],
        ["parallel.cp = 2 (2 = 0 x 4 + 2): replicas do not share experts"],
    ),
    (["parallel=fsdp_tp", "trainer.devices=4", "parallel.ep=2"], ["both would divide whole experts"]),
    (["parallel=zero2", "trainer.devices=4", "parallel.ep=2", "model=llama_tiny"], ["no block of the model has"]),
    (
        ["parallel=zero2", "trainer.devices=4", "parallel.ep=2", "parallel.activation_checkpoint=selective"],
        ["torch cannot gather weights of experts"],
    ),
]


@pytest.mark.parametrize(("words", "texts"), REFUSED, ids=lambda each: each[-1])
def test_degrees_that_do_not_fit_are_refused_with_the_arithmetic(words, texts):
    with pytest.raises(ConfigError) as refusal:
        check_config(compose_config(["recipe=quickstart", "model=moe_tiny", *words]), to_train=False)
    for text in texts:
        assert text in str(refusal.value)
