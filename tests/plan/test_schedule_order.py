"""The order of passes, which memory and time follow, against what torch's own schedules run, and its seconds."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lightning_llm.config.schema import ParallelConfig
from lightning_llm.plan.stages import Pass, bubble_fraction, passes_of, receives_waiting
from lightning_llm.plan.time.step import finish_times


def settings(schedule, stages=1):
    return ParallelConfig(name="pp", schedule=schedule, virtual_stages=stages)


TORCH = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class TracedStage:
    """A stage that takes down which passes it is asked for, and sends nothing."""

    is_first = is_last = has_backward = True

    def __init__(self, rank: int, stages: int):
        self.rank, self.num_stages, self.stage_index, self.passes = rank, stages, rank, []

    def forward_one_chunk(self, micro_batch, *_, **__):
        self.passes.append(Pass(True, self.rank, micro_batch))

    def backward_one_chunk(self, micro_batch, *_, **__):
        self.passes.append(Pass(False, self.rank, micro_batch))

    def __getattr__(self, name):
        return (lambda *_, **__: []) if name.startswith("get_") else lambda *_, **__: None


@pytest.mark.parametrize("schedule", TORCH)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 2), (4, 4), (4, 9), (3, 8)])
def test_the_order_is_the_one_torch_runs(schedule, pp, micro_batches):
    for rank in range(pp):
        stage = TracedStage(rank, pp)
        runner = object.__new__(TORCH[schedule])
        runner.__dict__.update(
            _stage=stage, _n_microbatches=micro_batches, _num_stages=pp, _stage_initialized=True, _loss_fn=None,
            _internal_losses=[], scale_grads=False, _has_backward=True,
        )  # fmt: skip
        outside = (
            "_initialize_stage",
            "_maybe_compute_loss",
            "_maybe_get_loss",
            "_update_losses",
            "_finalize_gradients",
        )
        for name in outside:
            runner.__dict__[name] = lambda *_, **__: None
        runner.__dict__["_check_inputs"] = lambda *_, **__: ([()] * micro_batches, [{}] * micro_batches)
        runner._step_microbatches()
        assert stage.passes == passes_of(settings(schedule), pp, rank, micro_batches)


@pytest.mark.parametrize(
    ("pp", "stages", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 2, 8), (2, 3, 2), (4, 3, 4), (4, 2, 16)]
)
def test_the_interleaved_order_is_the_one_torch_makes(pp, stages, micro_batches):
    rounds = max(1, micro_batches // pp)
    runner = SimpleNamespace(
        n_local_stages=stages, pp_group_size=pp, _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // rounds,
    )  # fmt: skip
    for rank in range(pp):
        theirs = ScheduleInterleaved1F1B._calculate_single_rank_operations(runner, rank)
        passes = [Pass(each.computation_type.name == "FORWARD", each.stage_index, each.microbatch_index)
                  for each in theirs if each is not None]  # fmt: skip
        assert passes == passes_of(settings("interleaved_1f1b", stages), pp, rank, micro_batches)


@pytest.mark.parametrize(("pp", "stages", "micro_batches"), [(2, 2, 4), (4, 2, 8), (8, 2, 8), (4, 3, 5), (4, 6, 8)])
def test_as_many_receives_wait_as_torch_posts_ahead(pp, stages, micro_batches):
    """But for at most two: torch also gives turns to sharding and reducing, which plans leave out."""
    mine = TracedStage(0, pp * stages)
    mine.__dict__.update(group_size=pp, group_rank=0, device="cpu")
    runner = ScheduleInterleaved1F1B([mine] * stages, micro_batches)
    ours = receives_waiting(settings("interleaved_1f1b", stages), pp, micro_batches)
    for rank, actions in runner.pipeline_order_with_comms.items():
        waiting, found = 0, []
        for each in actions:
            kind = each.computation_type.name
            waiting += kind.startswith("RECV")
            if kind in ("FORWARD", "FULL_BACKWARD"):
                found.append(waiting)
                waiting -= each.stage_index != (0 if kind == "FORWARD" else pp * stages - 1)
        assert len(found) == len(ours[rank])
        assert max(abs(a - b) for a, b in zip(found, ours[rank], strict=True)) <= (0 if pp == 2 else 2)
        assert sum(a != b for a, b in zip(found, ours[rank], strict=True)) <= 0.2 * len(found)


@given(pp=st.integers(1, 6), rounds=st.integers(1, 4), stages=st.integers(1, 3), forward=st.floats(0.1, 10))
def test_equal_stages_idle_as_the_formula_says(pp, rounds, stages, forward):
    micro_batches, stages = pp * rounds, stages if pp > 1 else 1
    schedules = ["interleaved_1f1b"] if stages > 1 else ["1f1b", "gpipe"]
    for schedule in schedules:
        orders = [passes_of(settings(schedule, stages), pp, rank, micro_batches) for rank in range(pp)]
        end = max(finish_times(orders, pp * stages, lambda each: forward if each.forward else 2 * forward, [0.0] * pp))
        work = 3 * forward * stages * micro_batches
        assert 1 - work / end == pytest.approx(bubble_fraction(pp, micro_batches, stages), abs=1e-9)


@pytest.mark.parametrize("schedule", TORCH)
def test_without_a_pipeline_micro_batches_follow_one_another(schedule):
    assert passes_of(settings(schedule), 1, 0, 2) == [Pass(kind, 0, each) for each in (0, 1) for kind in (True, False)]


def test_passes_wait_for_their_inputs_from_other_ranks():
    orders = [passes_of(settings("gpipe"), 2, rank, 1) for rank in range(2)]
    assert finish_times(orders, 2, lambda _: 1.0, [0.25, 0.25]) == [4.5, 3.25]


def test_deadlocked_orders_are_an_error():
    orders = [[Pass(False, 0, 0), Pass(True, 0, 0)], [Pass(True, 1, 0), Pass(False, 1, 0)]]
    with pytest.raises(ValueError, match="wait for each other"):
        finish_times(orders, 2, lambda _: 1.0, [0.0, 0.0])
