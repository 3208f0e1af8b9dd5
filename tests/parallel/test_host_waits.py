"""Number of waits of the host for the device in a step, and the operators of a step. 30 CPU seconds."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_llm
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config, ModelConfig, ParallelConfig, PrecisionConfig
from lightning_llm.dry_run.rank import count_step
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.apply import apply_parallel
from lightning_llm.parallel.grad_norm import gradient_norm
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.resolve import plan_of
from lightning_llm.train.step import READ_NUMBERS, TrainStep, read_numbers
from tests.parallel.rank_group import RankGroup
from tests.parallel.test_bytes import words_of
from tests.parallel.traced_run import layout_here, run_with

aten = torch.ops.aten
PACKAGE = str(Path(lightning_llm.__file__).parent)
READS = (aten._local_scalar_dense.default, READ_NUMBERS)
BY_NUMBERS = (aten.nonzero.default, aten.masked_select.default, aten.equal.default, aten._unique2.default)
"""Operators that also wait, because the host needs the shape or the bool of their result."""


class Waits(TorchDispatchMode):
    """Counts operators for which the host would wait for a device, by name, and copies to Python or NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = 0
        self.copies = [patch.object(Tensor, name, self._counted(name)) for name in ("tolist", "numpy")]

    def _counted(self, name: str) -> Any:
        copy = getattr(Tensor, name)

        def counted(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            if not self.inside:
                self.found.append(name)
            return copy(tensor, *arguments, **named)

        return counted

    def __enter__(self) -> "Waits":
        for each in self.copies:
            each.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for each in self.copies:
            each.stop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = function in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        named = kwargs or {}
        to_host = function is aten._to_copy.default and named.get("device") == torch.device("cpu")
        to_host = to_host and named.get("dtype") in (
            None,
            args[0].dtype,
        )  # otherwise a cast of a tensor that is on the host already
        if function in READS + BY_NUMBERS or by_mask or to_host:
            self.found.append(function.name())
        self.inside += 1
        try:
            return function(*args, **named)
        finally:
            self.inside -= 1


class SecondStep(pl.Callback):
    """Counts the waits from the second step's batch to the third's: what Lightning does between them is in it."""

    def __init__(self) -> None:
        self.waits = Waits()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.waits.__enter__()
        elif batch_idx == 2:
            self.waits.__exit__(None, None, None)


def waits_of(config: Config) -> list[str]:
    counted = SecondStep()
    run_with(config, counted, saves=False)
    return counted.waits.found


CASES = [
    ("fsdp_cp", "fp16", ["data.document_mask=true", "data.sequence_length=128"]),
    ("ddp", "bf16", []),
    pytest.param(
        "fsdp_cp", "fp16_mxfp8", ["data.document_mask=true", "data.sequence_length=128"], marks=pytest.mark.full
    ),
    pytest.param("hsdp_tp", "bf16", ["model.num_kv_heads=2"], marks=pytest.mark.full),
    pytest.param("fsdp_pp", "bf16", ["model.num_layers=2"], marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "precision", "more"), CASES)
def test_the_host_waits_once_per_step(layout, precision, more, ranks, small_run, tmp_path):
    """For loss, norm, overflow and whether to stop together; masks of shared sequences and documents take none."""
    words = words_of(layout, "tree", precision, "precision.casts=eager", "trainer.max_steps=3", *more)
    world = 8 if layout == "hsdp_tp" else 4
    config = compose_config(small_run(tmp_path, *words, f"trainer.devices={world}"))
    assert ranks(world).call(waits_of, config) == [READ_NUMBERS.name()]


class Opcodes:
    """Counts what Python executes of this package, by `sys.settrace`."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        place = frame.f_code.co_filename
        if not place.startswith(PACKAGE) or place.startswith(f"{PACKAGE}/dry_run"):  # which counts, too
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self


def opcodes_of_second_step(config: Config) -> int:
    opcodes, step = Opcodes(), TrainStep.__call__

    def twice(self: TrainStep, batch: Any) -> Any:
        step(self, batch)
        sys.settrace(opcodes)
        try:
            return step(self, batch)
        finally:
            sys.settrace(None)

    plan = plan_of(config)
    with patch.object(TrainStep, "__call__", twice):
        count_step(plan, Layout.from_config(plan.config.parallel, plan.degrees, torch.device("cpu"), 4), None)
    return opcodes.count


@pytest.mark.full
@pytest.mark.parametrize("layout", ["zero3", "ddp"])
def test_python_does_no_more_on_more_ranks_but_the_levels_of_the_tree(layout, small_run, tmp_path):
    """From 8 to 32 ranks as from 32 to 128: twice two levels more in each sum."""
    counts = []
    for world in (8, 32, 128):
        words = words_of(
            layout, "tree", "bf16", f"world={world}", "trainer.devices=4", f"data.global_batch_size={world}"
        )
        group = RankGroup(world, fake=True)
        counts.append(group.call(opcodes_of_second_step, compose_config(small_run(tmp_path, *words))))
        group.close()
    assert counts[2] - counts[1] == pytest.approx(counts[1] - counts[0], abs=20)  # a bucket that is padded


def test_numbers_are_read_as_they_are():
    values = {"loss": torch.tensor(1 / 3), "found": torch.tensor(1, dtype=torch.int32), "yes": torch.tensor(True)}
    assert read_numbers(values) == {"loss": torch.tensor(1 / 3).item(), "found": 1.0, "yes": 1.0}
    assert read_numbers({}) == {}


def test_replicated_tensor_parallel_parameters_are_counted_by_the_first_rank():
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 1.5)
    norms = []
    for rank in (0, 1):
        layout = Layout(ParallelConfig(name="tp", tp=2), Degrees(tp=2), rank)
        with Waits() as waits:
            norms.append(gradient_norm([parameter], layout))
        assert waits.found == []
    assert [norm.item() for norm in norms] == [3.0, 0.0]


def gathers(parallel: ParallelConfig) -> dict[str, list[float]]:
    """Return when each event of a forward pass began and ended, by its name in the profiler's trace."""
    sizes = {"vocab_size": 64, "num_layers": 3, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 2}
    with torch.device("meta"):
        model = Decoder(ModelConfig(name="tiny", ffn_hidden_size=64, max_sequence_length=16, **sizes), torch.float32)
    precision, device = PrecisionConfig(name="fp32", compute_dtype="fp32"), torch.device("cpu")
    apply_parallel(model, layout_here(parallel), precision, 0, 16, device)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(torch.zeros(1, 16, dtype=torch.int64))
    return {event.name: [event.time_range.start, event.time_range.end] for event in seen.events()}


def test_the_next_group_is_gathered_before_the_forward_pass_of_one(ranks):
    times = ranks(2).call(gathers, ParallelConfig(name="zero3", dp_shard=2, zero_stage=3))
    for place in range(3):
        assert times[f"FSDP::all_gather (layers.{place})"][0] < times[f"FSDP::pre_forward (layers.{place})"][0]
