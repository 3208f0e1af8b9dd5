"""Every registered optimizer under layouts: the bits of one rank, the state that is planned, resume elsewhere."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.optim import OPTIMIZERS
from lightning_llm.linalg import local
from lightning_llm.model.decoder import Decoder
from lightning_llm.optim.optimizer import role_of
from lightning_llm.parallel.apply import apply_parallel
from lightning_llm.parallel.whole_matrices import WholeMatrices
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.traffic import bytes_sent
from tests.parallel.curve_limits import FP32, Limits, exceeded, off
from tests.parallel.test_bytes import Sent
from tests.parallel.traced_run import Trace, difference, layout_here, of_all_stages, traced_run

KINDS = list(OPTIMIZERS)
KEYS = {
    "adamw8bit": ["optim.block_size=24"],  # several blocks in a row of 64, the last one short
    "muon": ["optim.learning_rate=2e-3", "optim.adamw_learning_rate=5e-4"],
}
SHAPE = ["model.num_heads=4", "model.num_kv_heads=2", "model.ffn_hidden_size=132", "trainer.max_steps=4"]
SHAPE += ["model.num_layers=4"]  # of each shape as many matrices as there are ranks, or a multiple: all send the same

# Measured over 4 steps (gradient, parameter): Muon 1.8e-4, 1.5e-3, since its updates are rounded to bf16; 8-bit AdamW
# 8e-7, 1.8e-5, one moment of some thousand having got another code.
LIMITS = {"muon": Limits(2e-6, 1e-5, 1e-5, 1e-3, 5e-3), "adamw8bit": Limits(2e-6, 1e-5, 1e-5, 1e-5, 1e-4)}


class Measure(pl.Callback):
    """Counts bytes of the optimizer's final state, without step counts, and bytes that it sends in the last step."""

    def __init__(self) -> None:
        self.state_bytes = 0
        self.rates: list[float] = []
        self.sent = Sent()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        step = optimizer.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.sent:
                return step(*args, **kwargs)

        if pl_module.completed_steps == trainer.max_steps - 1:
            optimizer.step = counted

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        states = trainer.optimizers[0].state.values()
        tensors = [value for state in states for key, value in state.items() if key != "step"]
        self.rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.state_bytes = sum(local(tensor).nbytes for tensor in tensors)


def measured_run(config: Any) -> Trace:
    measure = Measure()
    trace = traced_run(config, measure, saves=False)
    counted = measure.sent.counted
    return trace | {"state_bytes": measure.state_bytes, "sent": counted.by_kind(counted.bytes), "rates": measure.rates}


@pytest.fixture(scope="module")
def run(ranks, matrix_run):
    def made(kind: str, layout: str, world: int, *more: str, function: Any = measured_run) -> tuple[Any, Trace]:
        config = matrix_run(layout, world, 4, "fp32", f"optim={kind}", *KEYS.get(kind, []), *SHAPE, *more)
        return config, ranks(world).call(function, config)

    return made


@pytest.fixture(scope="module")
def alone(run):
    traces: dict[str, Trace] = {}

    def trace(kind: str) -> Trace:
        if kind not in traces:
            config, traces[kind] = run(kind, "single", 1)
            assert traces[kind]["state_bytes"] == memory_bytes(plan_of(config))["optimizer"]
        return traces[kind]

    return trace


def dealt(layouts: list[tuple[str, int]], others: Sequence[tuple[str, int]] = ()) -> list[Any]:
    """Return (kind, layout, world) of all pairs but adamw's, which other tests have: each layout with one of the kinds
    in turn; the rest is for test-full, as are `others`.
    """
    kinds = [kind for kind in KINDS if kind != "adamw"]
    cases = []
    for number, layout in enumerate([*layouts, *others]):
        for offset, kind in enumerate(kinds):
            covering = layout in layouts and number % len(kinds) == offset
            cases.append(pytest.param(kind, *layout, marks=[] if covering else pytest.mark.full))
    return cases


@pytest.mark.parametrize(
    ("kind", "layout", "world"),
    dealt([("zero1", 2), ("zero3", 4), ("hsdp", 4)], others=[("ddp", 2), ("zero2", 4)]),
)
def test_bits_are_those_of_one_rank_and_state_is_as_planned(kind, layout, world, run, alone):
    config, ours = run(kind, layout, world)
    assert difference(ours, alone(kind)) is None
    assert ours["state_bytes"] == memory_bytes(plan_of(config))["optimizer"]
    plain = config.model_copy(update={"optim": OPTIMIZERS["adamw"](learning_rate=1e-3)})
    others = bytes_sent(plan_of(plain))
    planned = {each: size - others[each] for each, size in bytes_sent(plan_of(config)).items()}
    assert ours["sent"].get("all_to_all", 0) == planned["all_to_all"]
    assert set(ours["sent"]) <= {"all_to_all"}


def test_the_schedule_moves_each_group_from_its_own_peak(alone):
    """After the last of four steps of wsd, which decays in its last fifth, each group is at its final factor."""
    hidden, head, others = alone("muon")["rates"]
    assert (hidden, head, others) == (pytest.approx(2e-4), pytest.approx(5e-5), pytest.approx(5e-5))


@pytest.mark.parametrize(("kind", "layout", "world"), dealt([("tp", 2)], others=[("fsdp_tp", 4)]))
def test_a_tensor_parallel_run_follows_that_of_one_rank(kind, layout, world, run, alone):
    blocks = ["optim.block_size=2"] if kind == "adamw8bit" else []
    expected = run(kind, "single", 1, *blocks)[1] if blocks else alone(kind)
    config, ours = run(kind, layout, world, *blocks)
    assert exceeded(off(ours, expected), LIMITS.get(kind, FP32)) == []
    assert ours["state_bytes"] == memory_bytes(plan_of(config))["optimizer"]


CHAIN = [("zero3", 4), ("ddp", 2), ("single", 1), ("zero2", 2)]
MOVED = [pytest.param(kind, marks=[] if kind == "muon" else pytest.mark.full) for kind in KINDS]
"""In `make test` adamw's state moves between these layouts in test_resume_layouts.py."""


@pytest.mark.parametrize("kind", MOVED)
def test_a_run_resumes_under_other_layouts_with_the_same_bits(kind, run, tmp_path):
    """One step under each layout, from the checkpoint of the one before; the sharded states are put together anew."""
    words = ["checkpoint.every_steps=1", "model.num_layers=2", "schedule.total_steps=4"]
    for steps, (layout, world) in enumerate(CHAIN, 1):
        more = [f"run.dir={tmp_path / 'run'}", f"trainer.max_steps={steps}", "resume=auto"]
        parts = run(kind, layout, world, *words, *more, function=traced_run)[1]
    whole = run(kind, "single", 1, *words, f"run.dir={tmp_path / 'whole'}", function=traced_run)[1]
    whole["gradients"] = parts["gradients"] = []  # those of a run's own first steps
    curves = [[line for line in trace["curve"] if line[3] is not None] for trace in (parts, whole)]
    parts["curve"], whole["curve"] = curves  # without validations, which a run has at its end, too
    assert difference(whole, parts) is None


def exchanged(config: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Return each hidden matrix and its exchanged copy, with reversed rows, and the elements that each rank took."""
    layout = layout_here(config.parallel)
    with torch.device("meta"):
        model = Decoder(config.model)
    apply_parallel(model, layout, config.precision, 1, config.data.sequence_length, torch.device("cpu"))
    named = {name: each for name, each in model.named_parameters() if role_of(name, each.ndim) == "hidden"}
    names = {id(each): name for name, each in named.items()}
    made: dict[str, torch.Tensor] = {}
    counts: list[int] = []

    def backwards(matrix: torch.Tensor) -> torch.Tensor:
        counts.append(matrix.numel())
        return matrix.flip(0)

    with torch.no_grad():
        on_whole = WholeMatrices(layout)
        for parameter, part in on_whole(list(named.values()), lambda each: local(each).bfloat16(), backwards):
            made[names[id(parameter)]] = like(parameter, part.float())
        whole = {name: (full(parameter), full(made[name])) for name, parameter in named.items()}
    found = of_all_stages({f"{name} {n}": each for name, pair in whole.items() for n, each in enumerate(pair)}, layout)
    work: list[Any] = [None] * config.trainer.devices
    torch.distributed.all_gather_object(work, sum(counts))
    return found, work


def like(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, torch.distributed.tensor.DTensor):
        return part
    copy = parameter.detach().clone()
    copy.to_local().copy_(part)
    return copy


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor.detach()


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        ("fsdp_tp", 4),
        pytest.param("ddp", 2, marks=pytest.mark.full),
        *(pytest.param(layout, 4, marks=pytest.mark.full) for layout in ("zero3", "hsdp", "pp_tp", "fsdp_cp")),
    ],
)
def test_each_matrix_is_whole_on_one_of_its_ranks(layout, world, ranks, small_run, tmp_path):
    place = [f"parallel={layout}", f"trainer.devices={world}", "model.ffn_hidden_size=66", *SHAPE[:2]]
    config = compose_config(small_run(tmp_path, *place, "model.num_layers=4"))
    found, work = ranks(world).call(exchanged, config)
    names = {name.rpartition(" ")[0] for name in found}
    assert len(names) == 4 * 7
    for name in names:
        assert torch.equal(found[f"{name} 1"], found[f"{name} 0"].bfloat16().float().flip(0))
    copies = {"hsdp": 2, "ddp": 2}.get(layout, 1)  # replicas do the same work
    assert sum(work) == copies * sum(found[f"{name} 0"].numel() for name in names)
    assert max(work) <= 1.5 * sum(work) / world
