"""Context parallelism: ranks share a sequence. Each holds some of its tokens, and sees everybody's keys and values."""

from torch import Tensor

from lightning_llm.parallel.layout import Layout


class SequenceCut:
    """Takes from whole sequences the tokens that this rank computes."""

    def __init__(self, layout: Layout):
        self.ranks, self.place = layout.degrees.cp, layout.place.cp

    def __call__(
        self, tokens: Tensor, labels: Tensor, document_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return (tokens, labels, positions, document ids) of this rank; positions are None for whole sequences."""
        return tokens, labels, None, document_ids
