"""Prefetching and transfer of batches: on CUDA by other processes, from page-locked memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash
from lightning_llm.data.corpus import Batch, ValidationBatch
from lightning_llm.plan.degrees import Degrees
from lightning_llm.train.module import CorpusDataModule

WORDS = ["model=llama_tiny", "data=python", "callbacks=none", "logger=none"]


def loaders(device: str, *words: str):
    """Return the loaders of a run on a device that need not be there: they are made, and not read."""
    layout = SimpleNamespace(degrees=Degrees(), dp_rank=0, micro_batches=lambda count: list(range(count)))
    strategy = SimpleNamespace(root_device=torch.device(device), layout=layout)
    corpus = SimpleNamespace(validation_batches=lambda *_: [])
    module = CorpusDataModule(corpus, compose_config([*WORDS, *words]))
    module.trainer = SimpleNamespace(strategy=strategy, lightning_module=SimpleNamespace(completed_steps=0))
    return module.train_dataloader(), module.val_dataloader()


@pytest.mark.parametrize(
    ("device", "words", "workers", "pinned"),
    [
        ("cuda", [], 2, True),
        ("cpu", [], 0, False),
        ("cuda", ["data.num_workers=0"], 0, True),
        ("cpu", ["data.num_workers=1"], 1, False),
    ],
)
def test_batches_are_read_ahead_and_pinned_on_cuda(device, words, workers, pinned):
    training, validation = loaders(device, *words)
    assert (training.num_workers, training.persistent_workers, training.pin_memory) == (workers, workers > 0, pinned)
    assert (validation.num_workers, validation.pin_memory) == (0, pinned)


def test_what_reads_ahead_is_in_no_hash():
    words = ["data.num_workers=null", "data.num_workers=0"]  # that of an earlier release's default
    assert len({config_hash(compose_config([*WORDS, word])) for word in words}) == 1


def test_a_pinned_batch_has_all_its_tensors_pinned(monkeypatch):
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 100)  # there may be no CUDA to pin memory for
    rows = torch.arange(4).reshape(1, 2, 2)
    masked, plain = Batch(rows, rows + 1, rows + 2).pin_memory(), Batch(rows, rows + 1, None).pin_memory()
    assert (masked.document_ids == rows + 102).all()
    assert plain.document_ids is None
    held_out = ValidationBatch(rows[0], rows[0], None, torch.tensor([0, 1])).pin_memory()
    for tensor, least in ((masked.tokens, 100), (plain.labels, 101), (held_out.sources, 100)):
        assert tensor.min() == least
