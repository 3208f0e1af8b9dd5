"""Tokens per second of the loader alone, relative to the training speed of the quickstart model."""

import time
from collections.abc import Iterator

import torch

from benchmarks.rotation import Row, interleaved_minima, stepping
from lightning_llm.config.compose import compose_config
from lightning_llm.data.opening import open_corpus
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.train.module import StepDataset


def measure() -> Iterator[Row]:
    """Yield both rates and their ratio."""
    run = compose_config(["recipe=quickstart"])
    corpus = open_corpus(run.data, run.seed, run.model.vocab_size)
    model = Decoder(run.model, torch.bfloat16)
    initialise(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    micro_batches = list(range(run.data.global_batch_size // run.data.micro_batch_size))
    data, step_tokens = StepDataset(corpus, micro_batches), run.data.global_batch_size * run.data.sequence_length
    batch = data[0]

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
            (next_token_loss_sum(model(tokens), labels) / batch.labels.numel()).backward()
        optimizer.step()

    best = interleaved_minima({"train": stepping(train)}, rounds=5, steps=4)["train"]
    steps, start = 2000, time.perf_counter()
    for step in range(steps):
        data[step]
    loaded = steps * step_tokens / (time.perf_counter() - start)
    yield "loader alone, tokens/s", loaded, ""
    yield "loader over the quickstart's training, ratio", loaded / (step_tokens / best), ">= 50"
