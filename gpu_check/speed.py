"""G4: how fast native and emulated recipes are against compiled bf16: 8b-class layers, a 1b-class model's training."""

import gc
from collections.abc import Callable, Iterator

import torch
from torch import nn

from gpu_check import setting
from gpu_check.library import layer_of
from gpu_check.rows import Clock, Row, guarded, judged, missing
from gpu_check.setting import milliseconds, model_config, native_recipes, recipes
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.hardware import device_name, peak_flops_per_second
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.flops import flops_per_token
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.parallel.compile import compile_blocks
from lightning_llm.precision.native.decide import decide
from lightning_llm.train.quantisation import Quantisation

TOKENS = 8192
LAYERS = {"o_proj": (4096, 4096), "up_proj": (4096, 14336), "down_proj": (14336, 4096)}
SEQUENCES, LENGTH = 4, 2048
NATIVE_TARGET, EMULATED_TARGET = 1.0, 1.5
EMULATED = ("fp8_current", "fp8_subchannel", "mxfp8", "nvfp4_all_blocks", "mxfp4_sr")
ORDER = ("fp8_current", "fp8_subchannel", "fp8_delayed")
TRAINED_EMULATED = "mxfp8"
NO_BASE = "no bf16 baseline"
Work = Callable[[], None]


def check(clock: Clock) -> Iterator[Row]:
    """Yield layers first, then whole training steps, then the emulation's price, as far as the time goes."""
    native = {name: recipe for name, (recipe, _) in native_recipes().items()}
    first = [name for name in ORDER if name in native]
    base: dict[str, Work] = {}
    yield from guarded("layers in bf16", base_layers, base)
    for name in (*first, *(name for name in native if name not in ORDER)):
        if not clock.allows(5):
            yield missing(f"layers under {name}", "out of time")
            continue
        yield from guarded(f"layers under {name}", layers, f"{name}, native", native[name], base)
    if not native:
        yield missing("native recipes", setting.here().library_problem or "this GPU has none")
    steps: dict[str, float] = {}
    for name, recipe in {**{name: recipes()[name] for name in ("bf16", *first)}, **_emulated(TRAINED_EMULATED)}.items():
        if not clock.allows(25):
            yield missing(f"llama_1b under {name}", "out of time")
            continue
        yield from guarded(f"llama_1b under {name}", training, recipe, steps)
    for name, recipe in _emulated(*EMULATED).items():
        if not clock.allows(15):
            yield missing(f"layers under {name}", "out of time")
            continue
        yield from guarded(f"layers under {name}", layers, name, recipe, base)


def _emulated(*names: str) -> dict[str, PrecisionConfig]:
    return {f"{name}, emulated": recipes()[name].model_copy(update={"backend": "emulated"}) for name in names}


def base_layers(base: dict[str, Work]) -> Iterator[Row]:
    """Yield the time of each 8b-class layer in compiled bf16, and put its work into `base`, by shape."""
    for shape, (inputs, outputs) in LAYERS.items():
        layer = layer_of(recipes()["bf16"], inputs, outputs)
        work = step_of(torch.compile(layer), layer, inputs, outputs)
        taken = milliseconds({"bf16": work})["bf16"]
        base[shape] = work
        yield Row(_what(shape, "bf16, compiled"), taken, "ms", "measured", _rate(shape, taken))


def layers(name: str, recipe: PrecisionConfig, base: dict[str, Work]) -> Iterator[Row]:
    """Yield compiled bf16's time over the recipe's, forward and backward of each 8b-class layer with fp32 masters."""
    for shape, (inputs, outputs) in LAYERS.items():
        layer = layer_of(recipe, inputs, outputs)
        layer.keys = torch.arange(9, device=setting.DEVICE)
        baseline = {"bf16": base[shape]} if shape in base else {}
        taken = milliseconds({**baseline, name: step_of(layer, layer, inputs, outputs)})
        what, figures = (
            f"{_what(shape, name)}: bf16's time over it",
            f"{taken[name]:.3f} ms, {_rate(shape, taken[name])}",
        )
        if not baseline:
            yield missing(what, f"{NO_BASE}; {figures}")
            continue
        ratio = taken["bf16"] / taken[name]
        holds, target = _judge(ratio, name.endswith("native"))
        yield judged(what, ratio, "", holds, f"{target}; {figures}")


def _judge(ratio: float, native: bool) -> tuple[bool, str]:
    """Return whether bf16's time over a recipe's is what it should be, and what that is."""
    if native:
        return ratio >= NATIVE_TARGET, f">= {NATIVE_TARGET}"
    least = 1 / EMULATED_TARGET
    return ratio >= least, f">= {least:.2f} (at most {EMULATED_TARGET} times slower)"


def _what(shape: str, name: str) -> str:
    return f"{shape} {TOKENS} x {LAYERS[shape][0]} x {LAYERS[shape][1]}, {name}"


def _rate(shape: str, taken: float) -> str:
    return f"{6 * TOKENS * LAYERS[shape][0] * LAYERS[shape][1] / (taken * 1e-3) / 1e12:.0f} TFLOP/s"


def step_of(
    call: Callable[[torch.Tensor], torch.Tensor], layer: nn.Module, inputs: int, outputs: int
) -> Callable[[], None]:
    """Return a function that runs forward and backward of one layer once."""
    x = torch.randn(TOKENS, inputs, device=setting.DEVICE).bfloat16().requires_grad_()
    dy = torch.randn(TOKENS, outputs, device=setting.DEVICE).bfloat16()

    def step() -> None:
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        call(x).backward(dy)

    return step


def training(recipe: PrecisionConfig, steps: dict[str, float]) -> Iterator[Row]:
    """Yield tokens/s, model FLOPs utilisation (of bf16's peak) and the ratio to bf16 of a plain loop over llama_1b.

    Blocks are compiled, but for emulated casts, which are compiled by themselves, as in a run.
    """
    config = model_config("llama_1b", max_sequence_length=LENGTH)
    runs = decide(recipe, setting.here()).runs
    try:
        seconds = plain_loop(config, recipe, SEQUENCES, LENGTH, compiled=runs == "native")
    finally:
        free_memory()
    if not recipe.quantises:
        steps[recipe.name] = seconds
    rate = SEQUENCES * LENGTH / seconds
    peak = peak_flops_per_second(device_name(torch.device(setting.DEVICE)), "bf16")
    used = "" if peak is None else f"{100 * rate * flops_per_token(config, LENGTH) / peak:.1f} % of bf16's peak"
    name = f"{recipe.name}, {runs}" if recipe.quantises else f"{recipe.name}, compiled"
    yield Row(f"llama_1b, {SEQUENCES} x {LENGTH} tokens, {name}", rate, "tokens/s", "measured", used)
    if not recipe.quantises:
        return
    what = f"llama_1b, a step, {name}: compiled bf16's time over it"
    if "bf16" not in steps:
        yield missing(what, NO_BASE)
        return
    ratio = steps["bf16"] / seconds
    yield judged(what, ratio, "", *_judge(ratio, runs == "native"))


def free_memory() -> None:
    """Give back what a model took: compiled blocks are in reference cycles, and the compiler's caches keep them."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def plain_loop(config: object, recipe: PrecisionConfig, sequences: int, length: int, compiled: bool) -> float:
    """Return the seconds of one step of a hand-written loop: forward, backward, clipping, fused AdamW."""
    quantisation = Quantisation(recipe, 0, 100, decide(recipe, setting.here()))
    with torch.device("meta"):
        model = Decoder(config, compute_dtype=torch.bfloat16)  # type: ignore[arg-type]
    quantisation.swap(model, model.config.num_layers, setting.DEVICE)
    if compiled:
        compile_blocks(model.blocks)
    model.to_empty(device=setting.DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, model.config.vocab_size, (sequences, length), device=setting.DEVICE)
    taken = 0

    def step() -> None:
        nonlocal taken
        quantisation.begin_step(model, 0)
        quantisation.begin_micro_batch(model, taken, 0)
        optimizer.zero_grad(set_to_none=True)
        (next_token_loss_sum(model(tokens), tokens) / tokens.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        quantisation.end_micro_batch(model, lambda amax: amax)
        optimizer.step()
        quantisation.end_step(model, lambda amax: amax)
        taken += 1

    return milliseconds({"step": step}, repeats=3, rounds=3)["step"] * 1e-3
