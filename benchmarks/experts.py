"""A training step of a mixture of experts: ours against transformers' Mixtral and Qwen3-MoE, and emulated recipes.

All by the CPU time of one thread, with 8 experts of which a token passes 2.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers import DTYPES, Step, loop_step
from benchmarks.precision import TINY, training_step
from benchmarks.roofline import PARTS
from benchmarks.rotation import Row, interleaved_minima, stepping
from benchmarks.shape import Shape, config, random_batch
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import Counts, next_token_loss_sum
from lightning_llm.parallel.apply import compile_blocks

EXPERTS, PER_TOKEN, INNER = 8, 2, 256
BALANCE_LOSS = 0.01
"""Weight of the load-balancing loss, which all contenders add; ours without a z-loss, which the others do not have."""
PEERS = ("Mixtral", "Qwen3Moe")
RECIPES = ("mxfp8", "nvfp4")
HOW = ("eager", "compiled")
TARGET, RECIPE_TARGET = ">= 1.2", "<= 1.3"
ROUNDS, STEPS = 5, 2


def our_step(shape: Shape, compiled: bool, dtype: torch.dtype) -> Step:
    """Return a function that makes one step of `moe_tiny` in the plain loop."""
    kind = "model.blocks.moe.feed_forward"
    run = config(
        f"{kind}.z_loss=0",
        f"{kind}.balance_loss={BALANCE_LOSS}",
        f"{kind}.ffn_hidden_size={INNER}",
        shape=shape,
        model="moe_tiny",
    )
    model = Decoder(run.model, dtype)
    initialise(model, 0)
    if compiled:
        compile_blocks(model.blocks)
    tokens, labels = random_batch(shape)
    routers = [module for module in model.modules() if isinstance(module, Counts)]

    def loss() -> torch.Tensor:
        model.auxiliary.begin_step(1.0, 1.0)
        for router in routers:
            router.begin_step()
        return next_token_loss_sum(model(tokens), labels) / labels.numel()

    return loop_step(model, loss)


def peer_step(name: str, shape: Shape, compiled: bool, dtype: torch.dtype) -> Step:
    """Return a function that makes one step of transformers' model `name` in a typical loop, with its balance loss."""
    model = transformers_model(name, shape)
    tokens, labels = random_batch(shape)
    forward = torch.compile(model) if compiled else model

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = forward(tokens, labels=labels, shift_labels=labels)
            result: torch.Tensor = out.loss
            return result

    return loop_step(model, loss)


def transformers_model(name: str, shape: Shape) -> nn.Module:
    """Return transformers' "Mixtral" or "Qwen3Moe" with its own choice of kernels."""
    import transformers

    common = {
        "vocab_size": shape.vocab, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.heads, "max_position_embeddings": 1024,
        "head_dim": shape.hidden // shape.heads, "num_experts_per_tok": PER_TOKEN, "use_cache": False,
        "output_router_logits": True, "router_aux_loss_coef": BALANCE_LOSS, "tie_word_embeddings": False,
    }  # fmt: skip
    if name == "Mixtral":
        config = transformers.MixtralConfig(**common, num_local_experts=EXPERTS, intermediate_size=INNER)
        return transformers.MixtralForCausalLM(config)
    config = transformers.Qwen3MoeConfig(
        **common, num_experts=EXPERTS, moe_intermediate_size=INNER, norm_topk_prob=True
    )
    return transformers.Qwen3MoeForCausalLM(config)


def measure() -> Iterator[Row]:
    """Yield CPU milliseconds of a step of each contender, our ratios, and what a recipe costs over a dense model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # idle threads spin
    try:
        yield from _loops()
        yield from _recipes()
    finally:
        torch.set_num_threads(threads)


def _loops() -> Iterator[Row]:
    """Yield the milliseconds of a step of each contender in the plain loop, and our ratios to the faster peer."""
    for name, dtype in DTYPES.items():
        steps = {how: our_step(TINY, how == "compiled", dtype) for how in HOW}
        fastest = {}
        for how in HOW:
            made = {peer: stepping(peer_step(peer, TINY, how == "compiled", dtype)) for peer in PEERS}
            ours = {f"ours, {each}": stepping(steps[each]) for each in HOW[: 1 + HOW.index(how)]}
            best = interleaved_minima(made | ours, ROUNDS, STEPS, clock=time.process_time)
            fastest[how] = min(best[peer] for peer in PEERS)
            for each, seconds in best.items():
                yield f"{each}, beside {name}, {how}: CPU ms per step", seconds * 1e3, ""
            for each in ours:
                yield f"{each}, over the faster one, {name}, {how}", fastest[how] / best[each], TARGET
        if name == "fp32":
            yield from _limits(steps["eager"], fastest)


def _limits(step: Step, fastest: Mapping[str, float]) -> Iterator[Row]:
    """Yield CPU milliseconds of products, ours and theirs, and the ratios if our other operators took no time."""
    ours = cpu_seconds_by_part(step)
    theirs = cpu_seconds_by_part(peer_step("Mixtral", TINY, False, torch.float32))
    for whose, parts in {"ours": ours, "Mixtral": theirs}.items():
        for part, seconds in parts.items():
            yield f"{whose}, fp32, eager: CPU ms of {part}", seconds * 1e3, ""
    for how, seconds in fastest.items():
        title = f"ours without other operators, over the faster one, fp32, {how}"
        yield title, seconds / sum(ours.values()), ""


class _CpuSeconds(TorchDispatchMode):
    """CPU seconds of the operators of each of `roofline.PARTS`."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.process_time()
        out = func(*args, **(kwargs or {}))
        spent, name = time.process_time() - start, func.name()
        part = next((part for part, begins in PARTS.items() if name.startswith(begins)), None)
        if part is not None:
            self.seconds[part] += spent
        return out


def cpu_seconds_by_part(step: Step) -> dict[str, float]:
    """Return the least CPU seconds of several steps by part; other operators are left out."""
    found = []
    for _ in range(ROUNDS * STEPS):
        with _CpuSeconds() as counted:
            step()
        found.append(counted.seconds)
    return {part: min(each[part] for each in found) for part in PARTS}


def _recipes() -> Iterator[Row]:
    """Yield for each recipe its time over bf16's with experts, divided by the same ratio of `llama_tiny`."""
    steps = {
        f"{model} {recipe}": stepping(training_step(recipe, TINY, 1, model=model))
        for model in ("llama_tiny", "moe_tiny")
        for recipe in ("bf16", *RECIPES)
    }
    best = interleaved_minima(steps, ROUNDS, 1, warmup=1, clock=time.process_time)
    for recipe in RECIPES:
        dense, experts = (best[f"{model} {recipe}"] / best[f"{model} bf16"] for model in ("llama_tiny", "moe_tiny"))
        yield f"{recipe}: CPU time over bf16's, dense", dense, ""
        yield f"{recipe}: CPU time over bf16's, experts, over the dense ratio", experts / dense, RECIPE_TARGET
