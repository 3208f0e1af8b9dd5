"""The DataModule: batch number n of the corpus, n counted over the whole run."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_llm.base.folders import use_short_sockets
from lightning_llm.config.schema import Config
from lightning_llm.data.corpus import Batch, Corpus
from lightning_llm.plan.memory.units import micro_batches_per_rank

WORKERS_ON_CUDA = 2
"""Number of loader processes that prefetch batches when training on a GPU."""


class StepDataset(Dataset[Batch]):
    """Item `step` is the batch of optimizer step `step` (0-based): a pure function of config and seed."""

    def __init__(self, corpus: Corpus, micro_batches: list[int]):
        """`micro_batches`: global indices of the micro-batches that this rank computes in every step."""
        self.corpus, self.micro_batches = corpus, micro_batches

    def __getitem__(self, step: int) -> Batch:
        return self.corpus.micro_batches(step, self.micro_batches)


class StepSampler(Sampler[int]):
    """The steps from `first` to `last`, exclusive."""

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last))

    def __len__(self) -> int:
        return max(0, self.last - self.first)


class CorpusDataModule(pl.LightningDataModule):
    """Training batches by step number and the fixed validation batches."""

    def __init__(self, corpus: Corpus, config: Config):
        super().__init__()
        self.corpus = corpus
        self.config = config

    def train_dataloader(self) -> DataLoader[Batch]:
        first = self.trainer.lightning_module.completed_steps
        layout = self.trainer.strategy.layout
        count = micro_batches_per_rank(self.config, layout.degrees)
        workers = self.config.data.num_workers
        if workers is None:
            workers = WORKERS_ON_CUDA if self._on_cuda else 0
        if workers:
            use_short_sockets()
        return DataLoader(
            StepDataset(self.corpus, layout.micro_batches(count)),
            batch_size=None,
            sampler=StepSampler(first, self.config.trainer.max_steps),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self._on_cuda,
        )

    def val_dataloader(self) -> Any:
        layout = self.trainer.strategy.layout
        batches = self.corpus.validation_batches(self.config.data.micro_batch_size, layout.dp_rank, layout.degrees.dp)
        fixed: Any = list(batches)
        return DataLoader(fixed, batch_size=None, pin_memory=self._on_cuda)

    @property
    def _on_cuda(self) -> bool:
        return bool(self.trainer.strategy.root_device.type == "cuda")
