"""Whether blocks are compiled where `parallel.compile` leaves it open: on CUDA, where they can be. Imports no torch.

The config keeps its null: as with the device itself, what came of it is a fact of the run (`compiled` in its summary),
which `compare` looks at, and no part of the config's hash.
"""

from lightning_llm.config.schema import ParallelConfig
from lightning_llm.plan.degrees import Degrees
from lightning_llm.precision.native.capability import Capability


def compiles(parallel: ParallelConfig, degrees: Degrees, capability: Capability) -> bool:
    """Return whether blocks are compiled on the device of `capability`."""
    if parallel.compile is not None:
        return parallel.compile
    return capability.compute_capability is not None and why_not(parallel, degrees, capability) is None


def compile_note(parallel: ParallelConfig, degrees: Degrees, capability: Capability) -> str | None:
    """Return why blocks run operator by operator on a GPU although nobody asked for that; None where they do not."""
    if parallel.compile is not None or capability.compute_capability is None:
        return None
    reason = why_not(parallel, degrees, capability)
    return reason and f"note   blocks run operator by operator, not compiled as on CUDA by default: {reason}"


def why_not(parallel: ParallelConfig, degrees: Degrees, capability: Capability) -> str | None:
    """Return why blocks cannot be compiled on the device of `capability`; None where nothing is known against it."""
    return capability.no_compiler or compiler_failure(parallel, degrees)


def compiler_failure(parallel: ParallelConfig, degrees: Degrees) -> str | None:
    """Return what torch's compiler fails at: blocks that cp and tp share and that are recomputed whole.

    It counts a mesh among the tensors that such a block keeps (torch 2.13: "expected all tensors_saved_with_vc_check to
    be Tensors").
    """
    modes = parallel.activation_checkpoint_layers or (parallel.activation_checkpoint,)
    if "full" not in modes or degrees.cp == 1 or degrees.tp == 1:
        return None
    return (
        f"torch's compiler fails at blocks that are recomputed whole under cp={degrees.cp} and tp={degrees.tp} together"
    )
