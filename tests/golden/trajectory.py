"""A few steps of one precision recipe as text: losses, gradient norms, the gradient norm of every parameter.

Bits depend on the kernels that PyTorch chooses for the processor, so curves lie in a folder per family of kernels,
named by a fingerprint of what plain torch operations give there, none of this project's code in them. A processor of a
recorded family must give its curves to the last bit; another, the numbers of any family as far as rounding goes.
Products are torch's own, also where runs take fp32's for them (`lightning_llm.linalg.gemm`).
"""

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F

from lightning_llm.config.compose import compose_config
from lightning_llm.golden.measure import measure
from lightning_llm.linalg import gemm
from lightning_llm.plan.check import check_config

HERE = Path(__file__).parent
SHIPPED = sorted(file.stem for file in (HERE.parents[1] / "conf" / "precision").glob("*.yaml"))
HYBRIDS = {"bf16_gla": "bf16", "fp8_unit_scaled": "fp8_unit"}
"""Curves of other models than the shipped recipes': gated linear attention with documents, and one attention block;
unit scaling."""
RECIPES = sorted([*SHIPPED, *HYBRIDS])
MORE_WORDS = {
    "nvfp4": ["model.num_layers=4"],
    "fp8_unit_scaled": ["model.unit_scaling=true", "optim.umup_depth=3", "optim.learning_rate=0.5"],
    "bf16_gla": ["model.layers=[gla, gla, attention]", "data.document_mask=true"],
}
"""Of three blocks the fractions that nvfp4 keeps high would be none, and its curve that of nvfp4_all_blocks."""
STEPS = 4
GRADIENT_STEPS = 2
WORDS = [
    "model=llama_tiny", "model.num_layers=3", "model.hidden_size=64", "model.num_heads=1", "model.num_kv_heads=1",
    "model.ffn_hidden_size=128", "model.vocab_size=288",
    "data=text", f"data.sources.text.path={HERE / 'corpus.txt'}", "data.sources.text.sample_by=paragraph",
    "data.tokenizer.kind=bytes", "data.tokenizer.vocab_size=null", "data.validation.fraction=0",
    "data.sequence_length=64", "data.micro_batch_size=2", "data.global_batch_size=4",
    "precision.casts=eager", "optim.learning_rate=1e-2", "optim.gradient_clip_norm=0.5", "schedule=constant",
    "schedule.warmup_steps=2", f"trainer.max_steps={STEPS}", "trainer.validate_every_steps=null",
    "trainer.accelerator=cpu", "checkpoint.every_steps=null", "callbacks=none", "logger=none",
]  # fmt: skip


def kernels() -> dict[str, str]:
    """Return everything except this project's code that the bits of a curve depend on."""
    return {
        "torch": torch.__version__,
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": _fingerprint(),
    }


def _fingerprint() -> str:
    """Return 16 hex digits over the bits of plain operations of a curve's shapes, forward and backward, one thread."""
    digest = blake2b(digest_size=8)
    for tensor in _operations():
        digest.update(tensor.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _numbers(*shape: int) -> torch.Tensor:
    """Return the same fp32 numbers on every machine: integers times a power of two, about -4 to 4."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7919 % 8191 - 4095).float() / 1024).reshape(shape)


def _operations() -> Iterator[torch.Tensor]:
    for dtype in (torch.float32, torch.bfloat16):
        x, w = _numbers(128, 64).to(dtype), _numbers(128, 64).flip(0).to(dtype)
        yield x @ w.T
        yield w.T @ x
        q = _numbers(2, 1, 64, 64).to(dtype).requires_grad_()
        attended = F.scaled_dot_product_attention(q, q.detach().flip(2), q.detach(), is_causal=True)
        yield attended
        yield from torch.autograd.grad(attended.float().square().sum(), q)
        yield F.silu(x)
    logits = _numbers(128, 288).requires_grad_()
    loss = F.cross_entropy(logits, torch.arange(128) * 5 % 288, reduction="sum")
    yield loss
    yield from torch.autograd.grad(loss, logits)
    x = _numbers(128, 64)
    yield from (x.square().mean(-1).rsqrt(), x.cos(), x.sin(), x.exp(), x.sum(), x.norm())
    parameter = torch.nn.Parameter(_numbers(64, 64))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, fused=True)
    for _ in range(2):
        parameter.grad = _numbers(64, 64).flip(1)
        optimizer.step()
    yield parameter


def trajectory(recipe: str, cache: Path) -> str:
    """Return the first steps under `recipe` as text; parsing it restores the same bits.

    The corpus is tokenised once in `cache`.
    """
    torch.set_num_threads(1)
    words = [
        *WORDS,
        *MORE_WORDS.get(recipe, []),
        f"precision={HYBRIDS.get(recipe, recipe)}",
        f"data.cache_dir={cache}",
    ]
    with gemm.unwidened():
        figures = measure(check_config(compose_config(words)), STEPS).figures
    lines = ["step  loss                grad_norm"]
    lines += [f"{each.step:<5} {each.loss!r:<19} {each.grad_norm!r}" for each in figures]
    # As the backward pass leaves them: times the loss scale, a power of two.
    norms = [
        {name: norm * each.loss_scale for name, norm in each.gradient_norms.items()}
        for each in figures[:GRADIENT_STEPS]
    ]
    width = max(map(len, norms[0]))
    rows = [["gradient of", *(f"norm at step {step + 1}" for step in range(GRADIENT_STEPS))]]
    rows += [[name, *(repr(each[name]) for each in norms)] for name in norms[0]]
    lines += ["", *("  ".join([f"{name:<{width}}", *(f"{each:<22}" for each in row)]).rstrip() for name, *row in rows)]
    return "\n".join(lines) + "\n"


def header(recipe: str) -> str:
    """Return the comment lines of a recorded curve."""
    facts = [f"# {key}: {value}" for key, value in kernels().items()]
    model = "hybrid" if recipe in HYBRIDS else "tiny"
    precision = HYBRIDS.get(recipe, recipe)
    what = f"# The first steps under precision={precision}: {model} model, tests/golden/corpus.txt, one CPU thread."
    how = "# `make test` compares to the last bit where torch and kernels are these; `make golden` records anew."
    return "\n".join([what, how, *facts]) + "\n\n"


def families() -> list[str]:
    """Return the families of kernels that curves are recorded of."""
    return sorted(folder.name for folder in HERE.iterdir() if (folder / "fp32.txt").exists())


def recipes_of(family: str) -> list[str]:
    """Return the recipes with a recorded curve of a family."""
    return sorted(file.stem for file in (HERE / family).glob("*.txt"))


def file_of(recipe: str, family: str) -> Path:
    """Return the file of the curve of `recipe` by the kernels of `family`."""
    return HERE / family / f"{recipe}.txt"


def recorded(recipe: str, family: str) -> tuple[dict[str, str], str]:
    """Return (kernels, curve) as recorded."""
    head, _, body = file_of(recipe, family).read_text(encoding="utf-8").partition("\n\n")
    pairs = [line.removeprefix("# ").split(": ", 1) for line in head.splitlines()[2:]]
    return dict(pairs), body


def first_difference(then: str, now: str) -> str | None:
    """Return the first line that is not the same, with the line it was; None where all are."""
    for old, new in zip(then.splitlines(), now.splitlines(), strict=False):
        if old != new:
            return f"recorded: {old}\nnow:      {new}"
    return None if then == now else "one is longer than the other"


def distances(then: str, now: str) -> list[float]:
    """Return by how much of itself each number of a curve differs, steps first, then parameters.

    Raises ValueError where they are not numbers of the same things.
    """
    found = []
    for old, new in zip(then.splitlines(), now.splitlines(), strict=True):
        (name, *numbers), (other, *others) = old.split() or [""], new.split() or [""]
        if name != other or len(numbers) != len(others):
            raise ValueError(f"{name} is {other} now")
        if name not in ("", "step", "gradient"):
            pairs = zip(map(float, numbers), map(float, others), strict=True)
            found += [abs(x - y) / max(abs(x), 1e-30) for x, y in pairs]
    return found
