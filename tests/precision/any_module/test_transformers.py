"""`quantize` on transformers' Llama against the same recipe on ours, from the same weights."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from lightning_llm import quantize
from lightning_llm.model.weights.load import state_dict_of, whole_decoder
from lightning_llm.run.resume.weights import open_weights
from tests.model.model_shapes import llama
from tests.precision.any_module.models import eager
from tests.weight_folders import write_huggingface

SHAPE = llama()
TOKENS = torch.randint(SHAPE.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "folder"
    write_huggingface(folder, SHAPE)
    return folder


def passes(model, logits_of):
    """Logits, and the gradient of the loss with respect to the embedding, which all layers are on the way to."""
    logits = logits_of(model)[..., : SHAPE.vocab_size].float()
    cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    embedding = next(parameter for name, parameter in model.named_parameters() if "embed" in name)
    return logits.detach(), embedding.grad[: SHAPE.vocab_size].clone()


@pytest.mark.parametrize("name", ["mxfp8", "fp8_current"])
def test_their_llama_and_ours_are_quantized_alike(folder, name):
    """In fp32 only the order of sums differs, which moves few elements to another code.

    So the two differ by a small part of the recipe's effect.
    """

    def theirs():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    weights = open_weights(folder)
    plain, model = theirs(), theirs()
    decoder = whole_decoder(weights.config, state_dict_of(weights)).requires_grad_(True)
    reports = [quantize(each, eager(name), seed=1) for each in (model, decoder)]
    for report in reports:
        report.step(0, micro_batch=0)
    assert len(reports[0].quantized) == len(reports[1].quantized) > 0
    exact = passes(plain, lambda each: each(TOKENS).logits)
    found = passes(model, lambda each: each(TOKENS).logits)
    expected = passes(decoder, lambda each: each(TOKENS))
    for unquantized, ours, other in zip(exact, expected, found, strict=True):
        assert (other - ours).norm() <= 0.1 * (other - unquantized).norm()
