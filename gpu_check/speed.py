"""Speed of a 1B model's training: `train` in compiled bf16 against a hand-written loop, and native FP8 against bf16."""

import gc
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_check import setting
from gpu_check.checks import MFU, MODEL, NATIVE_RATIO, NATIVE_STEP, RUN_PACKAGES, Call
from gpu_check.journal import Clock, Item, Journal, Row, judged, missing
from gpu_check.layers import Baseline, native_rows
from gpu_check.machine import lacking
from gpu_check.runs import Run, words
from gpu_check.setting import milliseconds, model_config, native_recipes, recipes
from lightning_llm.base.hardware import device_name, peak_flops_per_second
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.model.attention.kernel_choice import attention_by
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.flops import flops_per_token
from lightning_llm.model.loss import LossReduction, compiled_loss_sum, next_token_loss_sum
from lightning_llm.parallel.apply import compile_blocks
from lightning_llm.precision.native.decide import decide
from lightning_llm.train.quantization import Quantization

LENGTH, STEPS, WARMUP_STEPS = 2048, 40, 10
TRAIN_SECONDS = 100.0
"""Seconds of the check's time that `train` may take, most of it for start-up and compiling."""
PLAIN_TARGET = 1.0
ORDER = ("fp8_current", "fp8_subchannel", "fp8_delayed")
LOOP_RATE = f"{MODEL}, bf16, our model in a loop"
TRAIN_RATE = f"{MODEL}, bf16, train"


def items(call: Call) -> list[Item]:
    """Return items: steps in bf16, steps of three native recipes, then layers of every native recipe."""
    native = {name: recipe for name, (recipe, _) in native_recipes().items()}
    baseline = Baseline()
    first = [name for name in ORDER if name in native]
    found = [
        Item("train", 40, partial(trained, call)),
        Item("hand-written loop", 25, partial(hand_written, call.journal)),
        Item("our model in a loop", 20, partial(in_a_loop, recipes()["bf16"], call.journal)),
        *(Item(name, 20, partial(in_a_loop, native[name], call.journal)) for name in first),
        Item("our model in a loop, cudnn", 20, partial(with_cudnn, call.journal)),
    ]
    if not native:
        why = setting.here().library_problem or "this GPU has no native recipe"
        return [*found, Item("native FP8", 0, lambda: iter([missing(NATIVE_STEP, why)]))]
    behind = [*first, *(name for name in native if name not in first)]
    return [*found, *(Item(f"layers, {name}", 5, partial(native_rows, native[name], baseline)) for name in behind)]


def sequences() -> int:
    """Return the sequences of a step, which is one micro-batch.

    Limited, because a hand-written loop keeps all logits.
    """
    return 4 if setting.is_small_device() else 8


def trained(call: Call) -> Iterator[Row]:
    """Yield tokens/s and model FLOPs utilization of `lightning-llm train`, compiled: medians over its timed steps."""
    if gone := lacking(RUN_PACKAGES):
        yield missing(TRAIN_RATE, f"{', '.join(gone)} not installed")
        return
    overrides = words(
        call.scratch, "run", sequences(), LENGTH, STEPS, f"model={MODEL}", "precision=bf16", "trainer.compile=true",
        f"callbacks.throughput.warmup_steps={WARMUP_STEPS}",
    )  # fmt: skip
    run = Run(call.scratch / "run", overrides)
    run.finish(Clock(min(call.clock.left, TRAIN_SECONDS)), STEPS)
    rates = [record["tokens_per_second"] for record in run.timed()]
    waited = sum(record["data_seconds"] for record in run.timed())
    spread = f"{len(rates)} steps, {min(rates):.0f} to {max(rates):.0f}; {waited / len(rates) * 1e3:.1f} ms for data"
    yield from rate_rows(TRAIN_RATE, "train", statistics.median(rates), spread)


def hand_written(journal: Journal) -> Iterator[Row]:
    """Yield tokens/s of the plain model in an independent compiled loop, and the ratio of train's to them."""
    config = model_config(MODEL, max_sequence_length=LENGTH)
    try:
        step = plain_step(config, sequences(), LENGTH, setting.DEVICE, compiled=True)
        rate = sequences() * LENGTH / timed(step)
    finally:
        free_memory()
    yield Row(f"{MODEL}, bf16, hand-written loop", rate, "tokens/s", "measured", shape())
    what, ours = f"{MODEL}, bf16: train's tokens/s over a hand-written loop's", journal.value("speed", TRAIN_RATE)
    yield ratio_row(what, ours, rate, PLAIN_TARGET, "train has no tokens/s here")


def loop_rate(recipe: PrecisionConfig) -> float:
    """Return the tokens/s of our model in a hand-written loop with compiled blocks."""
    config = model_config(MODEL, max_sequence_length=LENGTH)
    try:
        return sequences() * LENGTH / timed(our_step(config, recipe, sequences(), LENGTH, compiled=True))
    finally:
        free_memory()


def in_a_loop(recipe: PrecisionConfig, journal: Journal) -> Iterator[Row]:
    """Yield tokens/s of our model in a loop; for recipes other than bf16 also bf16's time over theirs."""
    rate = loop_rate(recipe)
    if not recipe.quantizes:
        yield from rate_rows(LOOP_RATE, "our model in a loop", rate, shape())
        return
    yield Row(f"{MODEL}, {recipe.name}, native, our model in a loop", rate, "tokens/s", "measured", shape())
    base = journal.value("speed", LOOP_RATE)
    yield ratio_row(f"{NATIVE_STEP} {recipe.name}", rate, base, NATIVE_RATIO, "no bf16 baseline")


def with_cudnn(journal: Journal) -> Iterator[Row]:
    """Yield the bf16 loop's tokens/s with cuDNN's attention, over those with torch's default choice."""
    with attention_by("cudnn"):
        rate = loop_rate(recipes()["bf16"])
    base = journal.value("speed", LOOP_RATE)
    what = f"{MODEL}, bf16, trainer.attention_kernel=cudnn: tokens/s over torch's choice"
    if base is None:
        yield missing(what, "no bf16 baseline")
        return
    yield Row(what, rate / base, "times", "measured", f"{rate:.0f} tokens/s")


def ratio_row(what: str, rate: float | None, base: float | None, target: float, why_missing: str) -> Row:
    """Return `rate` over `base` as a row judged by `target`, or a row with the reason if one is missing."""
    if rate is None or base is None:
        return missing(what, why_missing)
    return judged(what, rate / base, "times", rate / base >= target, f">= {target}")


def rate_rows(what: str, whose: str, rate: float, note: str) -> Iterator[Row]:
    """Yield tokens/s, and their share of the device's bf16 peak if that is known.

    See `lightning_llm.base.hardware` and `lightning_llm.model.flops`.
    """
    yield Row(what, rate, "tokens/s", "measured", note)
    peak = peak_flops_per_second(device_name(torch.device(setting.DEVICE)), "bf16")
    config = model_config(MODEL, max_sequence_length=LENGTH)
    if peak is None:
        yield missing(f"{MFU} {whose}", "no table has this device's peak in bf16")
        return
    per_token = flops_per_token(config, LENGTH)
    text = f"of {peak / 1e12:.4g} TFLOP/s dense; {per_token:.4g} FLOPs a token"
    yield Row(f"{MFU} {whose}", 100 * rate * per_token / peak, "%", "measured", text)


def shape() -> str:
    """Return text on the size of a step: sequences and tokens."""
    return f"{sequences()} x {LENGTH} tokens a step"


def timed(step: Callable[[], None]) -> float:
    """Return the median seconds of one call of `step`, after a warm-up."""
    return milliseconds({"step": step}, repeats=3, rounds=3)["step"] * 1e-3


def free_memory() -> None:
    """Free the memory of deleted models, which reference cycles and the compiler's caches keep."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def our_step(
    config: ModelConfig, recipe: PrecisionConfig, sequences: int, length: int, compiled: bool
) -> Callable[[], None]:
    """Return a function that makes one step of a hand-written loop over our model: forward, backward, clipping, fused
    AdamW. With `compiled`, its blocks and loss are compiled; emulated casts are compiled separately, as in a run."""
    quantization = Quantization(recipe, 0, 100, decide(recipe, setting.here()))
    with torch.device("meta"):
        model = Decoder(config, compute_dtype=torch.bfloat16)
    quantization.swap(model, model.config.num_layers, setting.DEVICE)
    if compiled:
        compile_blocks(model.blocks)
    model.to_empty(device=setting.DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, model.config.vocab_size, (sequences, length), device=setting.DEVICE)
    loss_sum = compiled_loss_sum() if compiled else next_token_loss_sum
    scale = torch.full((), 1 / tokens.numel(), device=setting.DEVICE)
    taken = 0

    def step() -> None:
        nonlocal taken
        quantization.begin_step(model, 0)
        quantization.begin_micro_batch(model, taken, 0)
        optimizer.zero_grad(set_to_none=True)
        (model(tokens, loss=LossReduction(tokens, loss_sum, scale)) / tokens.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        quantization.end_micro_batch(model, lambda amax: amax)
        optimizer.step()
        quantization.end_step(model, lambda amax: amax)
        taken += 1

    return step


class PlainLlama(nn.Module):
    """Llama in plain torch, independent of this package: the baseline for `train`.

    Grouped attention, SwiGLU and RMSNorm with the sizes of `config`, without its RoPE scaling.
    """

    def __init__(self, config: ModelConfig, length: int, device: str):
        super().__init__()
        size, width = config.hidden_size // config.num_heads, config.hidden_size
        with torch.device(device):
            self.embedding = nn.Embedding(config.vocab_size, width)
            self.blocks = nn.ModuleList([PlainBlock(config, size) for _ in range(config.num_layers)])
            self.norm = nn.RMSNorm(width, eps=config.norm_eps)
            self.head = nn.Linear(width, config.vocab_size, bias=False)
            rates = config.rope_theta ** -(torch.arange(0, size, 2) / size)
            angles = torch.outer(torch.arange(length), rates).repeat(1, 2)  # [T, K]
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, T, V]` of `tokens` `[B, T]`."""
        return self.head(self.norm(self.hidden(tokens)))

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the output of the last block for `tokens` `[B, T]`: `[B, T, D]`."""
        x = self.embedding(tokens)  # [B, T, D]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


class PlainBlock(nn.Module):
    """Block of `PlainLlama`: attention and feed-forward network, each after a norm."""

    def __init__(self, config: ModelConfig, size: int):
        super().__init__()
        width, ffn = config.hidden_size, config.ffn_hidden_size
        self.size = size
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(width, eps=config.norm_eps) for _ in range(2))
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, config.num_kv_heads * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return `[B, T, D]` of `x` `[B, T, D]`."""
        normed = self.attention_norm(x)
        q, k, v = (f(normed).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (turned(each, cos, sin).to(v.dtype) for each in (q, k))  # [B, H, T, K], [B, G, T, K]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # [B, H, T, K]
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` `[B, H, T, K]` with rotary position embeddings applied."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def plain_step(config: ModelConfig, sequences: int, length: int, device: str, compiled: bool) -> Callable[[], None]:
    """Return a function that makes one step of a typical training loop: autocast to bf16 over fp32 weights,
    cross-entropy of fp32 logits, clipping, fused AdamW. With `compiled`, each block is compiled, and the head with the
    loss, as in torchtitan: one graph of all blocks would take minutes to compile."""
    model = PlainLlama(config, length, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(config.vocab_size, (sequences, length + 1), device=device)

    def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.head(model.norm(hidden)).flatten(0, 1).float(), labels.flatten())

    loss = torch.compile(loss_of) if compiled else loss_of
    if compiled:
        for block in model.blocks:
            block.compile()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            made = loss(model.hidden(tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous())
        made.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step
