"""The shape that the peers are compared at, and runs of ours at it."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.data.corpus import Corpus
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama and its batches: `batch` sequences of `length` tokens per step."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.batch * self.length


MIDDLE = Shape(hidden=256, layers=6, heads=8, ffn=704, vocab=4096, length=256, batch=8)
"""7 million parameters."""
SMALL = Shape(hidden=128, layers=4, heads=4, ffn=384, vocab=4096, length=256, batch=8)
"""2 million."""
LONG = replace(MIDDLE, length=1024, batch=2)
LARGE = Shape(hidden=640, layers=8, heads=10, ffn=1792, vocab=16_384, length=256, batch=2)
"""62 million."""


def config(*more: str, shape: Shape = MIDDLE, steps: int = 10_000, model: str = "llama_tiny") -> Config:
    """Return a run of ours at the shape, in a separate folder, with default callbacks and MLflow."""
    folder = Path(tempfile.mkdtemp(prefix="lightning-llm-bench-"))
    return compose_config([
        f"model={model}", f"model.hidden_size={shape.hidden}", f"model.num_layers={shape.layers}",
        f"model.num_heads={shape.heads}", f"model.num_kv_heads={shape.heads}", f"model.ffn_hidden_size={shape.ffn}",
        f"model.vocab_size={shape.vocab}", f"model.max_sequence_length={max(1024, shape.length)}",
        f"data.sequence_length={shape.length}", f"data.micro_batch_size={shape.batch}",
        f"data.global_batch_size={shape.batch}", f"trainer.max_steps={steps}", "trainer.validate_every_steps=null",
        "checkpoint.every_steps=null", "callbacks.sample=null", f"run.root={folder}", *more,
    ])  # fmt: skip


def plain_model(run: Config) -> Decoder:
    """Return the run's model, whole and with its initial weights, that computes in bf16."""
    model = Decoder(run.model, torch.bfloat16)
    initialise(model, run.seed)
    return model


def loop_steps(model: Decoder, run: Config, corpus: Corpus, rank: int = 0) -> Iterator[None]:
    """Yield after each step of a hand-written loop: loss, clipping, optimizer and batches as ours, and no trainer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step = 0
    while True:
        batch = corpus.micro_batches(step, [rank])
        optimizer.zero_grad(set_to_none=True)
        loss = next_token_loss_sum(model(batch.tokens[0]), batch.labels[0]) / batch.labels.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        step += 1
        yield


def random_batch(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, int64 [batch, length]."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
