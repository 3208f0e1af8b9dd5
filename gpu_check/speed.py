"""G4: how fast native and emulated recipes are against compiled bf16: 8b-class layers, a 1b-class model's training."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from gpu_check import setting
from gpu_check.library import layer_of
from gpu_check.rows import Clock, Row, guarded, judged, missing
from gpu_check.setting import milliseconds, model_config, native_recipes, recipes
from lightning_llm.hardware import device_name, peak_flops_per_second
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.flops import flops_per_token
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.parallel.compile import compile_blocks
from lightning_llm.precision.native import decide
from lightning_llm.schema.precision import PrecisionConfig
from lightning_llm.train.quantisation import Quantisation

TOKENS = 8192
LAYERS = {"o_proj": (4096, 4096), "up_proj": (4096, 14336), "down_proj": (14336, 4096)}
SEQUENCES, LENGTH = 4, 2048
NATIVE_TARGET, EMULATED_TARGET = 1.0, 1.5
EMULATED = ("fp8_current", "fp8_subchannel", "mxfp8", "nvfp4", "mxfp4_sr")
ORDER = ("fp8_current", "fp8_subchannel", "fp8_delayed")


def check(clock: Clock) -> Iterator[Row]:
    """Yield layers first, then whole training steps, then the emulation's price, as far as the time goes."""
    native = {name: recipe for name, (recipe, _) in native_recipes().items()}
    native = {
        name: native[name]
        for name in sorted(native, key=lambda n: (n not in ORDER, ORDER.index(n) if n in ORDER else 0))
    }
    base: dict[str, float] = {}
    yield from guarded("layers in bf16", layers, "bf16, compiled", recipes()["bf16"], base, compiled=True)
    for name, recipe in native.items():
        if not clock.allows(5):
            yield missing(f"layers under {name}", "out of time")
            continue
        yield from guarded(f"layers under {name}", layers, f"{name}, native", recipe, base)
    steps: dict[str, float] = {}
    for name in ("bf16", *native):
        if not clock.allows(25):
            yield missing(f"llama_1b under {name}", "out of time")
            continue
        yield from guarded(f"llama_1b under {name}", training, recipes()[name], steps)
        torch.cuda.empty_cache()
    if not native:
        yield missing("native recipes", setting.here().library_problem or "this GPU has none")
    for name in EMULATED:
        if not clock.allows(15):
            yield missing(f"layers under {name}, emulated", "out of time")
            continue
        recipe = recipes()[name].model_copy(update={"backend": "emulated"})
        yield from guarded(f"layers under {name}, emulated", layers, f"{name}, emulated", recipe, base)


def layers(name: str, recipe: PrecisionConfig, base: dict[str, float], compiled: bool = False) -> Iterator[Row]:
    """Yield the time of each 8b-class layer, forward and backward with fp32 masters, over compiled bf16's."""
    for shape, (inputs, outputs) in LAYERS.items():
        layer = layer_of(recipe, inputs, outputs)
        layer.keys = torch.arange(9, device=setting.DEVICE)
        taken = milliseconds(step_of(torch.compile(layer) if compiled else layer, layer, inputs, outputs), repeats=5)
        base.setdefault(shape, taken)
        what = f"{shape} {TOKENS} x {inputs} x {outputs}, {name}"
        flops = 6 * TOKENS * inputs * outputs / (taken * 1e-3) / 1e12
        if compiled:
            yield Row(what, taken, "ms", "measured", f"{flops:.0f} TFLOP/s")
            continue
        ratio, native = base[shape] / taken, name.endswith("native")
        holds = ratio >= NATIVE_TARGET if native else 1 / ratio <= EMULATED_TARGET
        target = (
            f">= {NATIVE_TARGET}"
            if native
            else f">= {1 / EMULATED_TARGET:.2f} (at most {EMULATED_TARGET} times slower)"
        )
        yield judged(f"{what}: bf16's time over it", ratio, "", holds, f"{target}; {taken:.3f} ms, {flops:.0f} TFLOP/s")


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
    """Yield tokens/s, model FLOPs utilisation (of bf16's peak) and the ratio to bf16 of a plain loop over llama_1b."""
    config = model_config("llama_1b", max_sequence_length=LENGTH)
    seconds = plain_loop(config, recipe, SEQUENCES, LENGTH, compiled=True)
    steps[recipe.name] = seconds
    rate = SEQUENCES * LENGTH / seconds
    peak = peak_flops_per_second(device_name(torch.device(setting.DEVICE)), "bf16")
    used = "" if peak is None else f"{100 * rate * flops_per_token(config, LENGTH) / peak:.1f} % of bf16's peak"
    yield Row(
        f"llama_1b, {SEQUENCES} x {LENGTH} tokens, {recipe.name}, compiled blocks", rate, "tokens/s", "measured", used
    )
    if recipe.quantises and "bf16" in steps:
        ratio = steps["bf16"] / seconds
        yield judged(f"llama_1b, {recipe.name} native over compiled bf16", ratio, "", ratio >= 1, ">= 1")


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
        optimizer.step()
        quantisation.end_step(model, lambda amax: amax)
        taken += 1

    return milliseconds(step, warmup=3, repeats=3) * 1e-3
