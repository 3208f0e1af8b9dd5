"""Validation loss on fixed batches: with the recipe and without casts, and per source, under every layout."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_llm.data.corpus import ValidationBatch
from lightning_llm.model.loss import IGNORED_LABEL
from lightning_llm.parallel.dp_shard import reshard
from lightning_llm.train.parallel_model import ParallelModel

VIEWS = ("val_loss", "val_loss_high_precision")
"""Views of the weights, as keys of records: with the recipe's forward pass, and without any cast. The second separates
damage to the weights from error of the forward pass. Recipes without casts have only the first."""


@dataclass
class Validation:
    """One pass through the validation batches: sums of losses and counts of target tokens, and the means at its end."""

    parallel: ParallelModel
    source_names: list[str]
    watched: Collection[str]
    """Sources that are not trained on, and excluded from the mean over sources."""
    device: torch.device

    sums: Tensor = field(init=False, repr=False)
    """Sums of losses and counts of tokens so far, fp64 [views, sources, 2]."""

    def begin(self) -> None:
        """Start a pass through the validation batches: reset all sums."""
        shape = len(VIEWS), len(self.source_names), 2
        self.sums = torch.zeros(shape, dtype=torch.float64, device=self.device)

    def add(self, batch: ValidationBatch, batch_index: int, step: int) -> None:
        """Add the loss of this rank's batch number `batch_index` with the weights after `step` steps."""
        model, layout, quantization = self.parallel.model, self.parallel.layout, self.parallel.quantization
        index = batch_index * layout.degrees.dp + layout.dp_rank  # global index, independent of the number of ranks
        quantization.begin_validation_batch(model, step, index, layout.validation_batches_at_once(batch_index))
        self._score(batch, self.sums[0])
        if quantization.changes_forward:
            with quantization.high_precision(model):
                self._score(batch, self.sums[1])
        elif quantization.recipe.quantizes:
            self.sums[1] = self.sums[0]  # both views have the same forward pass

    def _score(self, batch: ValidationBatch, sums: Tensor) -> None:
        parallel, whole = self.parallel, (batch.tokens, batch.labels, batch.document_ids)
        tokens, all_labels, positions, documents = parallel.sequence_sharder(*whole)
        logits = parallel.logits(tokens, positions, documents)  # [B, T, V]
        if logits is None:  # the pipeline's last stage has them
            return
        for source in batch.sources.unique():
            labels = all_labels.masked_fill((batch.sources != source)[:, None], IGNORED_LABEL)  # [B, T]
            sums[source, 0] += parallel.loss_sum(logits, labels).double()
            sums[source, 1] += (labels != IGNORED_LABEL).sum()

    def finish(self) -> dict[str, Any]:
        """Return the mean loss per view, and per view and source as VIEW/SOURCE, the same on every rank. Collective.

        The mean is over the sources that are trained on, or over the watched ones if none of those is scored.
        """
        # Sums of fp32 numbers of similar size are exact in fp64, so the order of ranks does not matter.
        # Pipeline stages before the last have zeros; ranks that share a sequence each have some of its tokens.
        sums = self.parallel.layout.reduce(self.sums, ReduceOp.SUM, "dp", "sequence", "layers").cpu()
        for sync in self.parallel.syncs:
            reshard(sync.model)  # a forward pass without a backward pass leaves parameters gathered
        losses: dict[str, Any] = {}
        trained = torch.tensor([name not in self.watched for name in self.source_names])
        for key, view in zip(VIEWS, sums, strict=True):
            if view[:, 1].sum() == 0:
                continue
            averaged = view[trained] if view[trained, 1].sum() else view
            losses[key] = (averaged[:, 0].sum() / averaged[:, 1].sum()).item()
            losses |= {
                f"{key}/{name}": loss / count
                for name, (loss, count) in zip(self.source_names, view.tolist(), strict=True)
                if count
            }
        return losses
