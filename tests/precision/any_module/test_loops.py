"""`quantize` in training loops: the bits of `train`, and the ends of micro-batches and steps."""

import copy

import pytest
import torch
from torch import nn

from lightning_llm import ConfigError, quantize
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.schema.precision import LossScalingConfig
from lightning_llm.data.corpus import Batch
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import LossReduction, next_token_loss_sum
from lightning_llm.plan.degrees import Degrees, micro_batches_of
from lightning_llm.train.quantization import LossScaler, Quantization
from tests.precision.any_module.models import Model, batches, eager, loss_of
from tests.train.test_step import OPTIM, SCHEDULE, LearningRate, made

LLAMA = ModelConfig(
    name="tiny", vocab_size=64, num_layers=3, hidden_size=64, num_heads=2, num_kv_heads=1, ffn_hidden_size=128,
    max_sequence_length=32,
)  # fmt: skip
SEED, STEPS = 7, 3
OTHERS = ["fp8_delayed_micro_batch", "fp8_current", "fp8_subchannel", "mxfp4_sr_fp8", "quartet"]


def assert_bits_of_train(recipe, scaling=None, overflow_at=None) -> None:
    """Train one Llama with `TrainStep`, a copy of it in a plain loop; losses, weights and counts must be the same.

    `overflow_at`: step whose gradients overflow, which the loss scaler and `torch.amp.GradScaler` skip.
    """
    trained = Decoder(LLAMA, compute_dtype=torch.bfloat16)
    initialise(trained, SEED)
    plain = copy.deepcopy(trained)
    quantization = Quantization(recipe, SEED, STEPS)
    quantization.swap(trained, LLAMA.num_layers, "cpu")
    number = 0

    def overflow(_):
        if number == overflow_at:
            next(trained.parameters()).grad[0, 0] = torch.inf

    step = made(trained, clip_norm=None, scaler=LossScaler(scaling), on_gradients=[overflow])
    step.parallel.quantization = quantization
    optimizer = OPTIM.build(plain.named_parameters(), None)
    rate = LearningRate(optimizer, SCHEDULE, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=scaling.init_scale if scaling else 1.0, enabled=scaling is not None)
    report = quantize(plain, recipe, seed=SEED, optimizer=optimizer)
    assert report.quantized == list(quantization.report.converted)
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        tokens, labels = torch.randint(64, (2, 2, 2, 32), generator=generator)  # 2 micro-batches
        updates = step.state.updates
        loss = step(Batch(tokens, labels, None))
        rate.set(updates)
        optimizer.zero_grad()
        targets = torch.tensor(labels.numel())
        losses = []
        for each, label in zip(tokens, labels, strict=True):
            reduction = LossReduction(label, next_token_loss_sum, torch.ones(()) / targets)
            losses.append(plain(each, None, None, reduction) / targets)
            scaler.scale(losses[-1]).backward()
        if number == overflow_at:
            next(plain.parameters()).grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(loss, torch.stack(losses).detach().sum())
        assert report.at == (step.state.completed_steps, 0)
    for ours, theirs in zip(plain.parameters(), trained.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert step.state.skipped_steps == (overflow_at is not None)


@pytest.mark.parametrize(
    "name",
    ["nvfp4", "fp8_delayed", *(pytest.param(each, marks=pytest.mark.full) for each in ("mxfp8", "mxfp4_sr", *OTHERS))],
)
def test_a_plain_loop_has_the_bits_of_train(name):
    assert_bits_of_train(eager(name))


@pytest.mark.parametrize("name", ["mxfp4_sr", pytest.param("fp8_delayed", marks=pytest.mark.full)])
def test_a_step_that_gradscaler_skips_counts_as_in_train(name):
    assert_bits_of_train(eager(name), LossScalingConfig(init_scale=1024.0, hysteresis=1), overflow_at=1)


def gradients(
    *, recipe="mxfp4_sr", wrap=None, reentrant=None, attached=True, validates=False, both_first=False, by_hand=False
) -> list[torch.Tensor]:
    """Return all gradients of three steps of two micro-batches each."""
    model = Model(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    report = quantize(model, eager(recipe), optimizer=optimizer if attached else None)
    called, found = wrap(model) if wrap else model, []
    for number, step in enumerate(batches()):
        losses = []
        for micro_batch, tokens in enumerate(step):
            if by_hand:
                report.step(number, micro_batch=micro_batch)
            losses.append(loss_of(called, tokens))
            if validates:
                called.eval()
                with torch.no_grad():
                    called(tokens)
                called.train()
            if not both_first:
                losses[-1].backward()
        for loss in losses if both_first else ():
            loss.backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    assert report.at == ((2, 1) if by_hand else (3, 0))
    return found


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def plain() -> list[torch.Tensor]:
    return gradients()


@pytest.mark.parametrize(
    "loop",
    [
        {"attached": False},  # the first optimizer that steps a parameter ends the steps
        {"attached": False, "by_hand": True},
        {"reentrant": False, "validates": True},
        {"reentrant": True},
    ],
    ids=str,
)
def test_loops_that_do_the_same_have_the_same_bits(loop, plain):
    assert same(gradients(**loop), plain)


def test_recomputed_blocks_repeat_their_own_forward_pass_when_another_came_between():
    assert same(gradients(both_first=True, reentrant=False), gradients(both_first=True))


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["mxfp4_sr", "fp8_delayed"])
@pytest.mark.parametrize("inner", [False, True])
def test_compiled_modules_have_the_bits_of_eager_ones(recipe, inner):
    def wrap(model):
        if not inner:
            return torch.compile(model, backend="aot_eager", fullgraph=True)
        for block in model.layers:
            block.compile(backend="aot_eager")
        return model

    assert same(gradients(recipe=recipe, wrap=wrap), gradients(recipe=recipe))


def test_every_step_and_micro_batch_draws_other_bits_and_evaluation_repeats_none():
    model, seen = Model(), []
    report = quantize(model, eager("mxfp4_sr"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for tokens in batches(2).flatten(0, 1):
        seen.append(tuple(model.layers[0].up.keys.tolist()))
        assert torch.equal(model(tokens), model(tokens))  # without a backward pass, the micro-batch continues
        loss_of(model, tokens).backward()
        if len(seen) == 2:
            optimizer.step()
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            model(tokens)
            seen.append(tuple(model.layers[0].up.keys.tolist()))
    assert len(set(seen)) == 6
    assert report.at == (1, 2)


def test_micro_batches_are_counted_if_all_quantized_layers_are_frozen():
    model = Model()
    model.layers.requires_grad_(False)
    model.embedding.requires_grad_(False)
    report = quantize(model, eager("mxfp4_sr"))
    for number in range(3):
        assert report.at == (0, number)
        loss_of(model, batches()[0, 0]).backward()


@pytest.mark.parametrize("attached", [True, False])
def test_a_step_that_gradscaler_skips_ends(attached):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    report = quantize(model, eager("mxfp4_sr"), optimizer=optimizer if attached else None)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    before = model.lm_head.weight.clone()
    for ended, scale in enumerate([float("inf"), 1.0, float("inf"), 1.0], 1):
        (scaler.scale(loss_of(model, batches()[0, 0])) * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        assert report.at == (ended, 0)
        assert torch.equal(model.lm_head.weight, before) == (ended == 1)
        optimizer.zero_grad()


def test_the_step_and_delayed_scales_are_saved_and_restored():
    def steps(model, optimizer, numbers):
        for number in numbers:
            optimizer.zero_grad()
            loss_of(model, batches()[number, 0]).backward()
            optimizer.step()

    whole = Model()
    report = quantize(whole, eager("fp8_delayed"), optimizer=(optimizer := torch.optim.SGD(whole.parameters(), 0.1)))
    steps(whole, optimizer, range(2))
    resumed = Model()
    resumed.load_state_dict(whole.state_dict())
    again = torch.optim.SGD(resumed.parameters(), 0.1)
    other = quantize(resumed, eager("fp8_delayed"), optimizer=again)
    other.load_state_dict(report.state_dict())
    assert other.at == report.at == (2, 0)
    steps(whole, optimizer, [2])
    steps(resumed, again, [2])
    assert same(list(whole.parameters()), list(resumed.parameters()))


def test_steps_must_be_numbers_from_0_on():
    report = quantize(nn.Linear(64, 64), eager("mxfp8"))
    with pytest.raises(ConfigError, match=r"^n=-1: must be an integer of at least 0"):
        report.step(-1)


def test_attached_optimizers_may_come_later_wrapped_or_in_a_list():
    model = Model()
    report = quantize(model, eager("mxfp4_sr"))
    optimizers = [torch.optim.SGD(model.layers.parameters(), 0.1), torch.optim.SGD(model.lm_head.parameters(), 0.1)]
    report.attach(optimizers)
    loss_of(model, batches()[0, 0]).backward()
    optimizers[0].step()
    assert report.at == (0, 1)
    optimizers[1].step()
    assert report.at == (1, 0)


def _of_rank(kind: str, recipe: str) -> list[torch.Tensor]:
    """Return the weights after three steps; each of two ranks has one of the two micro-batches."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    rank, model = dist.get_rank(), Model()
    quantized_first = kind.endswith("before")
    report = quantize(model, eager(recipe)) if quantized_first else None
    called = model
    if kind.startswith("ddp"):
        called = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        fully_shard(model.layers[0].up, mesh=mesh)
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    report = report or quantize(called, eager(recipe))
    optimizer = torch.optim.SGD(called.parameters(), 0.2)  # of the mean over two ranks: 0.1 of their sum
    for step in batches():
        loss_of(called, step[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert report.at == (3, 0)
    found = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in called.parameters()]
    return [each.detach().clone() for each in found]


KINDS = ["ddp_before", *(pytest.param(each, marks=pytest.mark.full) for each in ("ddp", "fsdp_before", "fsdp"))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["fp8_delayed", pytest.param("mxfp4_sr", marks=pytest.mark.full)])
def test_two_ranks_have_the_bits_of_one(kind, recipe, ranks):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    quantize(model, eager(recipe), optimizer=optimizer)
    for step in batches():
        for tokens in step:
            loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(ranks(2).call(_of_rank, kind, recipe), list(model.parameters()))


def _accumulating_rank() -> list[torch.Tensor]:
    """Return the weights after three steps; each of two ranks has two of the four micro-batches in a row."""
    import torch.distributed as dist

    rank, model = dist.get_rank(), nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    quantize(model, eager("mxfp4_sr"), optimizer=optimizer, micro_batches=2)
    for first, last in zip(batches(6)[rank::2, 0], batches(6)[rank::2, 1], strict=True):
        with model.no_sync():
            loss_of(model, first).backward()
        loss_of(model, last).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().clone() for each in model.parameters()]


def test_accumulating_ddp_ranks_have_the_bits_of_trains_numbers(ranks):
    numbers = [micro_batches_of(Degrees(dp_replicate=2), 0, rank, 2) for rank in range(2)]
    assert numbers == [[0, 1], [2, 3]]
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    report = quantize(model, eager("mxfp4_sr"))
    for step, of_both in enumerate(batches(6).view(3, 2, 2, 2, 20)):
        sums = []
        for own, of_rank in zip(numbers, of_both, strict=True):
            for number, tokens in zip(own, of_rank, strict=True):
                report.step(step, micro_batch=number)
                loss_of(model, tokens).backward()
            sums.append([each.grad for each in model.parameters()])
            optimizer.zero_grad()
        for each, *of_ranks in zip(model.parameters(), *sums, strict=True):
            each.grad = sum(of_ranks)
        optimizer.step()
        optimizer.zero_grad()
    assert same(ranks(2).call(_accumulating_rank), list(model.parameters()))


class Skipping(Model):
    """A model with a block that only rank 0 runs, as where tokens are routed."""

    def forward(self, tokens):
        import torch.distributed as dist

        x = self.embedding(tokens)
        for number, block in enumerate(self.layers):
            x = x if number == 1 and dist.get_rank() == 1 else block(x)
        return self.lm_head(x)


def _skipping_rank() -> list[torch.Tensor]:
    """Return the scales after two steps."""
    model = nn.parallel.DistributedDataParallel(Skipping(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    report = quantize(model, eager("fp8_delayed"), optimizer=optimizer)
    for step in batches(2):
        loss_of(model, step[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [report.state_dict()["scales"][f"layers.{at}.up.scale"] for at in range(3)]


@pytest.mark.full
def test_ranks_may_run_other_layers(ranks):
    scales = ranks(2).call(_skipping_rank)
    assert all((scale[:3] != 1).all() for scale in scales)
