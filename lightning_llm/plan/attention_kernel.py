"""Rules of `trainer.attention_kernel`: the kernels that blocks, layout and data allow, without a device."""

from collections.abc import Iterator

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.model import DEFAULT_LAYERS
from lightning_llm.model.attention.kinds import AttentionSpec
from lightning_llm.model.spec import ForwardPass, Mixer
from lightning_llm.model.structure import mixer_of
from lightning_llm.plan.resolve import DerivedConfig, Plan, compiles

KEY = "trainer.attention_kernel"
OF_CUDA = ("cudnn", "efficient", "flex")
MASK_SOURCES = "a window, data.document_mask or parallel.cp"


def mixers_of(config: Config) -> dict[str, Mixer]:
    """Return the mixer of each kind of block, by its name in `model.layers`."""
    names = config.model.layers or DEFAULT_LAYERS
    return {config.model.layer_name(index): mixer_of(config.model, index) for index in range(len(names))}


def is_masked(mixer: AttentionSpec, config: Config, context_ranks: int, on_gpu: bool) -> bool:
    """Return whether the block's attention needs a mask other than the causal one over a whole sequence."""
    data = config.data
    return mixer.is_masked(ForwardPass(0, data.sequence_length, data.document_mask, context_ranks, on_gpu))


def attention_kernel_problems(derived: DerivedConfig) -> Iterator[Problem]:
    """Yield why the chosen kernel cannot be used."""
    config, name = derived.config, derived.config.trainer.attention_kernel
    if name == "auto":
        return
    mixers, context_ranks = mixers_of(config), derived.likely_degrees.sequence
    on_gpu = derived.capability.compute_capability is not None
    own = [each for each, mixer in mixers.items() if not (isinstance(mixer, AttentionSpec) and mixer.takes_kernels)]
    if own:
        yield Problem(KEY, f"is {name}, which blocks of {', '.join(own)} do not use. Set auto.")
    if name in OF_CUDA and not on_gpu:
        yield Problem(
            KEY, f"is {name}, a CUDA kernel, and the device is {derived.capability.device}. Set auto, flash or math."
        )
    if name == "short" and on_gpu:
        text = f"is short, a CPU kernel, and the device is {derived.capability.device}. Set auto or one of torch's."
        yield Problem(KEY, text)
    if name == "short" and context_ranks > 1:
        text = f"is short, which needs whole sequences, and parallel.cp={context_ranks} splits them. Set auto."
        yield Problem(KEY, text)
    masked = [
        each
        for each, mixer in mixers.items()
        if isinstance(mixer, AttentionSpec) and is_masked(mixer, config, context_ranks, on_gpu)
    ]
    if name == "flash" and on_gpu and masked:
        text = f"is flash, which takes no mask on CUDA; blocks of {', '.join(masked)} have one ({MASK_SOURCES})."
        yield Problem(KEY, f"{text} Set auto, efficient or cudnn.")
    if name == "flex" and on_gpu:
        yield from _flex_problems(derived, [each for each in mixers if each not in masked])


def _flex_problems(derived: DerivedConfig, plain: list[str]) -> Iterator[Problem]:
    """Yield why FlexAttention cannot be used: for blocks with `plain` causal attention, or blocks that run eagerly."""
    if plain:
        text = f"is flex, which needs a mask ({MASK_SOURCES}), and blocks of {', '.join(plain)} have none"
        yield Problem(KEY, f"{text}. Set auto or flash.")
    if not compiles(derived.config, derived.likely_degrees, derived.capability):
        yield Problem(KEY, "is flex, which runs only in compiled blocks. Set parallel.compile=true, or auto.")


def takes_blocks(plan: Plan) -> bool:
    """Return whether attention with a mask uses FlexAttention; a run tests at its start that the kernel works."""
    on_gpu = plan.capability.compute_capability is not None
    return on_gpu and plan.compiled and plan.config.trainer.attention_kernel in ("auto", "flex")
