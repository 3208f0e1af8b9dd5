"""Built-in transforms of both operands of a GEMM. Imports torch only to compute."""

from typing import TYPE_CHECKING, ClassVar, Literal

from lightning_llm.config.schema.cast_kinds import TRANSFORMS, TransformKind

if TYPE_CHECKING:
    from torch import Tensor


@TRANSFORMS.register
class Hadamard(TransformKind):
    """Sylvester's Hadamard matrix over the root of its size: spreads outliers before they share a scale."""

    name: Literal["hadamard"] = "hadamard"
    meaning: ClassVar[str] = "Sylvester's Hadamard matrix over the root of its size"

    def size_problem(self, size: int) -> str | None:
        return "must be a power of two, 2, 4, ..., 1024" if size & (size - 1) else None

    def exact_in_bf16(self, size: int) -> bool:
        return size.bit_length() % 2 == 1  # sizes 4, 16, 64, 256: the root is a power of two

    def matrix(self, size: int) -> "Tensor":
        import torch

        h = torch.ones(1, 1)
        while h.shape[0] < size:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
        return h * torch.tensor(size, dtype=torch.float32).rsqrt().item()
