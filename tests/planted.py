"""Faults planted into a run."""

from collections.abc import Callable

import torch

from lightning_llm.data.corpus import Batch, Corpus


def corrupted(step: int, micro_batch: int) -> Callable[..., Batch]:
    """Return a `Corpus.micro_batches` with labels that no text contains in one micro-batch of `step` (1-based)."""
    whole = Corpus.micro_batches

    def micro_batches(self: Corpus, index: int, indices=None) -> Batch:
        batch = whole(self, index, indices)
        if index == step - 1:
            count = self.config.global_batch_size // self.config.micro_batch_size
            own = range(count) if indices is None else indices
            batch.labels[[place for place, each in enumerate(own) if each == micro_batch]] = 298
        return batch

    return micro_batches


def infinite_gradient(forward: Callable, when: Callable[[int], bool]) -> Callable:
    """Return a decoder's `forward` with infinite gradients in the training micro-batches, from 0, that `when` names."""
    micro_batches = iter(range(10**6))

    def poisoned(self, *arguments, **keywords):
        logits = forward(self, *arguments, **keywords)
        if logits.requires_grad and when(next(micro_batches)):
            logits.register_hook(lambda gradient: gradient * float("inf"))
        return logits

    return poisoned


def corrupted_samples(first: int, last: int) -> Callable[..., Batch]:
    """Return a `Corpus.micro_batches` with labels that no text contains in training samples `first` to `last`."""
    whole = Corpus.micro_batches

    def micro_batches(self: Corpus, step: int, indices=None) -> Batch:
        batch = whole(self, step, indices)
        size, width = self.config.global_batch_size, self.config.micro_batch_size
        for place, each in enumerate(range(size // width) if indices is None else indices):
            for row in range(width):
                if first <= self.index_of(step * size + each * width + row) <= last:
                    batch.labels[place, row] = 298
        return batch

    return micro_batches


def wgrad_of_wrong_tensor(multiply: Callable, when: Callable[[int], bool]) -> Callable:
    """Return a `Linear.multiply` with the weight gradient of another input in the calls (from 0) that `when` names.

    Of the tokens in another order, as where a kernel reads a buffer that was meant for another: forward pass, loss and
    the gradient of the input are right.
    """
    calls = iter(range(10**6))

    def multiplied(self, x, weight, bias):
        if not torch.is_grad_enabled() or not when(next(calls)):
            return multiply(self, x, weight, bias)
        right = multiply(self, x, weight.detach(), bias)
        wrong = multiply(self, x.detach().roll(1, dims=-2), weight, None)
        return right + (wrong - wrong.detach())

    return multiplied
