"""Mesh axes as an extension point: one that a package adds, and an algorithm that leaves gradients apart."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash
from lightning_llm.config.schema import Config
from lightning_llm.optim.kinds import SynchronousConfig
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.axes.dp_replicate import ReplicaAxis
from lightning_llm.plan.check import check_config
from lightning_llm.plan.describe import cost_facts, layout_facts, layout_rows
from lightning_llm.plan.search.pricing import Pricer
from lightning_llm.plan.search.report import layout_name
from lightning_llm.plan.search.space import Choice, Space, typed_values
from lightning_llm.plan.traffic import sent_at
from tests.parallel.rank_group import RankGroup
from tests.parallel.traced_run import Trace, difference, run_with, traced_run, unsaved_run, whole
from tests.run_metrics import read_tensors


@pytest.fixture
def group() -> Iterator[Callable[[int], RankGroup]]:
    """Return a group of ranks for this test only, in which axes may be registered."""
    made: list[RankGroup] = []

    def start(world: int) -> RankGroup:
        made.append(RankGroup(world))
        return made[0]

    yield start
    for each in made:
        each.close()


def test_a_registered_axis_is_counted_by_degrees_groups_plans_and_checkpoints(group, ranks, small_run, tmp_path):
    words = [*small_run(tmp_path, "parallel=ddp", "data.micro_batch_size=1", "trainer.max_steps=2")]
    plain = compose_config([*words, "trainer.devices=2"])
    facts = layout_facts(check_config(plain))
    run = f"run.dir={tmp_path / 'spare'}"
    found = group(4).call(run_with_spare_axis, [*words, "trainer.devices=4", run])
    assert found["axes"] == ["pp", "dp_replicate", "spare", "dp_shard", "cp", "tp"]
    assert found["layout"]["groups"] == {
        "dp_replicate": {"count": 2, "size": 2, "stride": 2, "ranks": [[0, 2], [1, 3]]},
        "spare": {"count": 2, "size": 2, "stride": 1, "ranks": [[0, 1], [2, 3]]},
    }
    assert "dp_replicate=2 x spare=2" in found["text"]
    assert found["layout"]["micro_batches_per_rank"] == facts["micro_batches_per_rank"]
    assert found["sent"] == cost_facts(check_config(plain))["bytes_sent"]  # nothing over the axis
    assert found["hash"] == config_hash(compose_config([*words, "trainer.devices=4", run]))
    assert list(AXES) == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]  # it is registered in these ranks alone
    ranks(2).call(traced_run, plain)
    expected = read_tensors(newest(plain))
    assert expected.keys() == found["checkpoint"].keys()
    assert all(torch.equal(found["checkpoint"][name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("reduction", ["tree", pytest.param("native", marks=pytest.mark.full)])
def test_a_further_axis_of_replicas_has_gradients_summed_over_it(group, ranks, small_run, tmp_path, reduction):
    """Micro-batches are dealt over both axes of replicas, and the tree's sums are those of one rank."""
    words = small_run(tmp_path, "data.micro_batch_size=1", "trainer.max_steps=2", "checkpoint.every_steps=null")
    alone = ranks(1).call(unsaved_run, compose_config(words))
    more = ["parallel=ddp", "trainer.devices=4", f"parallel.reduction={reduction}", f"run.dir={tmp_path / 'workers'}"]
    found = group(4).call(run_with_workers, [*words, *more])
    if reduction == "tree":
        assert difference(found, alone) is None
    for name, gradient in found["gradients"][0].items():
        torch.testing.assert_close(gradient, alone["gradients"][0][name], rtol=1e-4, atol=1e-7, msg=name)


def run_with_workers(words: list[str]) -> Trace:
    """Return the trace of a run over two axes of replicas, the outer one registered here."""
    AXES.register(WorkerAxis(), outside="dp_replicate")
    return unsaved_run(compose_config([*words, "parallel.worker=2"]))


class WorkerAxis(ReplicaAxis):
    """Another axis of replicas, which a package adds."""

    name: ClassVar[str] = "worker"

    def search_degrees(self, config: Config, ranks: int) -> Sequence[int]:
        return (1, 2, 3, 4)


@pytest.mark.full
def test_a_registered_axis_with_degrees_to_search_takes_part_in_the_search(group):
    """Its layouts have the price of those with as many replicas over the built-in axis."""
    without, found = group(1).call(searched_with_workers)
    by_degree = {degree: [each for each in found if each.further == (("worker", degree),)] for degree in (1, 2, 4)}
    assert sum(map(len, by_degree.values())) == len(found) > len(without)
    assert [each[:-1] for each in by_degree[1]] == [each[:-1] for each in without]
    alone = [each for each in by_degree[2] if each.dp_replicate == 1 and not each.zero_stage]
    assert len(alone) == 30
    for choice in alone:
        name, price = found[choice]
        assert "worker 2, " in name
        assert price == found[choice._replace(dp_replicate=2, further=(("worker", 1),))][1]


def searched_with_workers() -> tuple[list[Choice], dict[Choice, tuple[str, list[float]]]]:
    """Return the layouts of four ranks without the axis, and with it each one's name, bytes and seconds."""
    words = ["model=llama_60m", "precision=bf16", "cluster=h100_dgx", "data.global_batch_size=8"]
    config = compose_config(words)
    without = list(Space(config, 4, {}).choices())
    AXES.register(WorkerAxis(), outside="dp_replicate")
    assert typed_values([*words, "parallel.worker=4"], compose_config([*words, "parallel.worker=4"])) == {"worker": 4}
    assert {each.further for each in Space(config, 4, {"worker": 4}).choices()} == {(("worker", 4),)}
    pricer = Pricer(Space(config, 4, {}), config.cluster)
    priced = {each: pricer.timed(pricer.memory(each)) for each in pricer.space.choices()}
    return without, {choice: (layout_name(each), [each.memory_bytes, each.seconds]) for choice, each in priced.items()}


def run_with_spare_axis(words: list[str]) -> dict[str, Any]:
    """Return the facts about the axis in the config, plan, groups and checkpoint of a run; registers the axis."""
    from tests.parallel import example_axis  # noqa: F401

    config = compose_config([*words, "parallel.spare=2"])
    plan = check_config(config)
    run_with(config)
    return {
        "axes": list(AXES),
        "hash": config_hash(compose_config(words)),
        "layout": layout_facts(plan),
        "text": dict(layout_rows(layout_facts(plan)))["layout"],
        "sent": cost_facts(plan)["bytes_sent"],
        "checkpoint": read_tensors(newest(config)),
    }


def newest(config: Config) -> Path:
    return max(Path(config.run.dir or "").glob("checkpoints/step=*"))


class Apart(SynchronousConfig):
    """An algorithm that lets replicas go apart."""

    def summed_axes(self, data_axes: Sequence[str]) -> Sequence[str]:
        return [axis for axis in data_axes if axis != "dp_replicate"]


@pytest.mark.parametrize(
    ("layout", "reduction"),
    [
        ("ddp", "tree"),
        ("hsdp", "native"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in [("ddp", "native"), ("hsdp", "tree")]),
    ],
)
def test_gradients_are_summed_over_those_axes_alone_that_the_algorithm_states(
    ranks, small_run, tmp_path, layout, reduction
):
    more = {
        "ddp": ["parallel=ddp", "trainer.devices=2"],
        "hsdp": ["parallel=hsdp", "parallel.dp_replicate=2", "trainer.devices=4"],
    }
    words = small_run(
        tmp_path, *more[layout], f"parallel.reduction={reduction}", "data.micro_batch_size=1",
        "data.global_batch_size=4", "trainer.max_steps=1", "checkpoint.every_steps=null",
        "optim.gradient_clip_norm=null",
    )  # fmt: skip
    together = compose_config(words)
    apart = compose_config([*words, f"run.dir={tmp_path / 'apart'}"]).model_copy(update={"algorithm": Apart()})
    world = together.trainer.devices
    summed, own = (ranks(world).call(first_gradients, each) for each in (together, apart))
    for name, gradient in summed["gradients"][0].items():
        first, last = own["gradients"][0][name], own["gradients"][-1][name]
        assert not torch.equal(first, last), name
        torch.testing.assert_close((first + last) / 2, gradient, rtol=1e-4, atol=1e-7)
        assert torch.equal(summed["gradients"][-1][name], gradient)
    assert own["loss"] == pytest.approx(summed["loss"], rel=1e-6)
    assert not any(sent_over(apart, "dp_replicate").values())
    assert any(sent_over(together, "dp_replicate").values())


def test_gradients_summed_by_fsdp2_cannot_be_kept_separate(small_run, tmp_path):
    config = compose_config(small_run(tmp_path, "parallel=zero3", "trainer.devices=2"))
    check_config(config.model_copy(update={"algorithm": Apart()}))
    with pytest.raises(ConfigError, match="dp_shard=2 ranks unsummed, but FSDP2 sums them"):
        check_config(config.model_copy(update={"algorithm": AllApart()}))


class AllApart(SynchronousConfig):
    """An algorithm that sums no gradients."""

    def summed_axes(self, data_axes: Sequence[str]) -> Sequence[str]:
        return ()


class FirstGradients(pl.Callback):
    """Keeps the first step's gradients of every rank, and its loss."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        own = {name: whole(parameter.grad) for name, parameter in pl_module.model.named_parameters()}
        self.gradients: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(self.gradients, own)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.loss = pl_module.step_record["loss"]


def first_gradients(config: Config) -> dict[str, Any]:
    found = FirstGradients()
    run_with(config, found, saves=False)
    return {"gradients": found.gradients, "loss": found.loss}


def sent_over(config: Config, axis: str) -> dict[str, int]:
    plan = check_config(config)
    return {kind: size for (kind, axes), size in sent_at(plan.config, plan.degrees, 0).items() if axes == axis}
