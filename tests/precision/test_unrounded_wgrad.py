"""`wgrad_dtype: fp32`: weights' gradients are the GEMM's fp32 sums, and nothing else of a step changes. 4 seconds."""

import pytest
import torch
from torch import nn

from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.compose import compose_config
from lightning_llm.linalg.gemm import linear, linear_with_unrounded_wgrad
from lightning_llm.model.decoder import Decoder
from lightning_llm.precision.linear.delayed import update_delayed
from lightning_llm.precision.linear.module import set_step_key
from lightning_llm.train.quantization import Quantization
from tests.precision.recipes import RECIPES, load, sample
from tests.precision.test_linear import TORCH_DTYPES, allowed, disagreement, expected, layer_of, run, tensors

QUANTIZED = sample([name for name in RECIPES if load(name).quantizes and name != "quartet_ii"])
UNROUNDED = {"wgrad_dtype": "fp32"}


def one_step(recipe):
    layer = layer_of(recipe)
    x, dy = tensors(TORCH_DTYPES[recipe.compute_dtype])
    set_step_key(layer, StepKey(seed=3, step=5, micro_batch=2))
    run(layer, x, dy)
    update_delayed(layer)  # so that delayed scales are not 1
    return run(layer, x, dy), expected(layer, recipe, x, dy)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_recipes_dw_agrees_with_float64_to_fp32s_precision(name):
    recipe = load(name)
    rounded, _ = one_step(recipe)
    (y, dx, dw), (_, _, wanted) = one_step(recipe.model_copy(update=UNROUNDED))
    assert torch.equal(y, rounded[0])
    assert torch.equal(dx, rounded[1])
    assert dw.dtype == torch.float32
    # Quartet's comes from a domain in which fp32 rounds it once before, and its sums take that many terms.
    assert disagreement(dw, wanted, torch.float32, recipe.dgrad.w.source == "quantised") <= allowed(name)
    dtype = TORCH_DTYPES[recipe.compute_dtype]
    assert disagreement(rounded[2], wanted, torch.float32, False) > 0.5  # the bound would reject this
    assert not torch.equal(dw, dw.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_linear_without_casts_has_the_same_y_and_dx_and_the_whole_dw(dtype):
    x, dy = tensors(dtype)
    weight = torch.randn(dy.shape[1], x.shape[1]).requires_grad_()
    bias = torch.randn(dy.shape[1], dtype=dtype).requires_grad_()
    made = []
    for layer in (lambda x: linear(x, weight.to(dtype), bias), lambda x: linear_with_unrounded_wgrad(x, weight, bias)):
        given = x.clone().requires_grad_()
        y = layer(given)
        made.append((y, *torch.autograd.grad(y, (given, bias, weight), dy)))
    for a, b in zip(*(each[:3] for each in made), strict=True):
        assert torch.equal(a, b)
    wanted = (dy.double().T @ x.double()).numpy()
    rounded, whole = (disagreement(each[3], wanted, torch.float32, False) for each in made)
    assert whole == 0 < 0.5 < rounded


def test_the_sum_of_small_gradients_is_not_lost():
    """The reason for it: equal roundings of 256 micro-batches' gradients do not cancel in their sum."""
    weight = nn.Parameter(torch.zeros(8, 8))
    x, dy = torch.ones(37, 8).bfloat16(), torch.full((37, 8), 1 / 9).bfloat16()
    wanted = 256 * 37 * dy[0, 0].double()
    off = {}
    for name, layer in (("unrounded", linear_with_unrounded_wgrad), ("rounded", lambda x, w: linear(x, w.to(x.dtype)))):
        weight.grad = None
        for _ in range(256):
            layer(x, weight).backward(dy)
        off[name] = float((weight.grad[0, 0].double() / wanted - 1).abs())
    assert off["unrounded"] < 1e-6 < 1e-4 < off["rounded"]


@pytest.mark.parametrize("words", [["precision=bf16"], ["precision=mxfp8", "model.tie_embeddings=true"]])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_matrix_of_a_model_is_reached(words, compiled):
    """Quantised or kept high, the head or the tied embedding, as a run swaps them: no gradient is one of bf16."""
    config = compose_config(["recipe=quickstart", "model=llama_tiny", "precision.wgrad_dtype=fp32", *words])
    torch.manual_seed(0)
    model = Decoder(config.model, torch.bfloat16)
    Quantization(config.precision, 0, 1, backend="eager").swap(model, config.model.num_layers, "cpu")
    for block in model.blocks.values() if compiled else ():
        block.compile(fullgraph=True)
    tokens = torch.randint(config.model.vocab_size, (2, 32))
    model(tokens).float().logsumexp(-1).sum().backward()
    matrices = {name: each.grad for name, each in model.named_parameters() if each.dim() == 2}
    assert len(matrices) == len(list(model.named_parameters())) - (2 * config.model.num_layers + 1)
    looked_up = {"embedding.weight"} if "precision=bf16" in words else set()
    rounded = {name for name, grad in matrices.items() if torch.equal(grad, grad.bfloat16().float())}
    assert rounded <= looked_up
