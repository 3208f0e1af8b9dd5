"""The shape that the peers are compared at, and runs of ours at it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.data.corpus import Corpus
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum

HIDDEN, LAYERS, HEADS, FFN, VOCAB, LENGTH, BATCH = 256, 6, 8, 704, 4096, 256, 8


def config(*more: str, steps: int = 10_000) -> Config:
    """Return a run of ours at the shape, in a folder of its own, with default callbacks and MLflow."""
    folder = Path(tempfile.mkdtemp(prefix="lightning-llm-bench-"))
    return compose_config([
        "model=llama_tiny", f"model.hidden_size={HIDDEN}", f"model.num_layers={LAYERS}", f"model.num_heads={HEADS}",
        f"model.num_kv_heads={HEADS}", f"model.ffn_hidden_size={FFN}", f"model.vocab_size={VOCAB}",
        f"data.sequence_length={LENGTH}", f"data.micro_batch_size={BATCH}", f"data.global_batch_size={BATCH}",
        f"trainer.max_steps={steps}", "trainer.validate_every_steps=null", "checkpoint.every_steps=null",
        "callbacks.sample=null", f"run.root={folder}", *more,
    ])  # fmt: skip


def loop_steps(model: Decoder, run: Config, corpus: Corpus, rank: int = 0) -> Iterator[None]:
    """Yield after each step of a hand-written loop: loss, clipping, optimizer and batches as ours, and no trainer."""
    initialise(model, run.seed)
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


def random_batch() -> tuple[Tensor, Tensor]:
    """Return tokens and labels, int64 [BATCH, LENGTH]."""
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain_step(model: nn.Module, autocast: bool) -> float:
    """Take one step of the hand-written loop that everyone writes: autocast, cross entropy, clip, fused AdamW."""
    tokens, labels = random_batch()
    optimizer = optimizers.setdefault(id(model), torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(tokens)
        logits = out.logits if hasattr(out, "logits") else out
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


optimizers: dict[int, torch.optim.Optimizer] = {}
