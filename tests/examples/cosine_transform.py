from typing import ClassVar, Literal

from lightning_llm.config.schema.cast_kinds import TRANSFORMS, TransformKind


@TRANSFORMS.register
class CosineTransform(TransformKind):
    """The orthonormal discrete cosine transform (DCT-II), of groups of any size."""

    name: Literal["cosine"] = "cosine"
    meaning: ClassVar[str] = "the orthonormal discrete cosine transform"

    def matrix(self, size):
        import torch

        sample, frequency = torch.arange(size).double()[:, None], torch.arange(size).double()
        matrix = (2 / size) ** 0.5 * torch.cos(torch.pi / size * (sample + 0.5) * frequency)
        matrix[:, 0] /= 2**0.5
        return matrix.float()
