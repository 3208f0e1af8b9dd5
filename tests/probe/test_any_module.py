"""`lightning_llm.probe` on modules that `quantize` changed: the figures of the verb, and the module stays as it is."""

import copy
import math

import pytest
import torch
from torch import nn

from lightning_llm import ConfigError, probe, quantize
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.probe.measure import END_TO_END, measure
from tests.precision.any_module.models import WIDTH, Model, eager, loss_of
from tests.precision.any_module.models import batches as token_batches
from tests.probe.test_measure import SHAPE, probed
from tests.probe.test_measure import batches as decoder_batches


def loss(model, tokens):
    return loss_of(model, tokens)


def test_a_module_has_the_figures_of_the_verb():
    recipe = eager("mxfp4_sr")
    model = Decoder(SHAPE, torch.bfloat16)
    initialise(model, seed=0)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    own = probed(weights, recipe)
    expected = measure(own, own.reference(), None, 2, attribute=False)
    quantize(model, recipe, seed=0)
    found = probe(
        model,
        decoder_batches(),  # of 64 targets each, so that means of means are exact
        loss=lambda model, batch: next_token_loss_sum(model(batch.tokens), batch.labels) / 64,
        keys=2,
        attribute=False,
    )
    assert found.figures["loss"]["recipe"] == expected["loss"]["recipe"]
    assert found.figures["loss"]["high"] == expected["loss"]["high"]
    for name, columns in expected["layers"].items():
        assert found.layers[name] | {END_TO_END: 0} == columns | {END_TO_END: 0}  # against the fp32 pass of the verb
    assert str(found).startswith(f"mxfp4_sr ({recipe.recipe_hash}), 14 linear layers, 2 keys")


def test_a_probe_changes_nothing_and_names_layers_to_keep():
    model, plain = Model(), Model()
    model.dropout = nn.Dropout(0.5)
    model.layers[1].up.weight.requires_grad_(False)
    quantize(model, eager("mxfp4_sr"), optimizer=(optimizer := torch.optim.SGD(model.parameters(), 0.1)))
    report = quantize(plain, eager("mxfp4_sr"))
    batch, generator = token_batches(1)[0], torch.get_rng_state()
    before = copy.deepcopy(model.state_dict())
    found = probe(model, batch, loss=loss, keys=1)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.layers[1].up.weight.requires_grad
    assert model.training
    assert set(found.keep) < set(report.quantized)
    assert found.figures["keep_high"]["won_back"] >= 0.8
    for each in (model, plain):
        loss(each, batch[0]).backward()
    assert torch.equal(model.lm_head.weight.grad, plain.lm_head.weight.grad)
    optimizer.step()


def test_parameters_in_bf16_are_compared_with_an_fp32_pass():
    model = Model().bfloat16()
    exact = sum(loss(copy.deepcopy(model).float(), tokens).item() for tokens in token_batches(1)[0]) / 2
    quantize(model, eager("mxfp8"))
    found = probe(model, token_batches(1)[0], loss=loss, attribute=False)
    assert found.figures["loss"]["fp32"] == pytest.approx(exact, rel=1e-6)
    assert found.figures["compute_dtype"] == "bf16"
    assert 0 < found.figures["gradient"]["error_high"] < found.figures["gradient"]["error"] < 0.01
    assert model.lm_head.weight.dtype == torch.bfloat16


class Answering(nn.Module):
    """A model with the interface of transformers: Conv1D, and a loss for labels; one layer is in two places."""

    def __init__(self):
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        torch.manual_seed(0)
        self.first = self.again = Conv1D(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x, labels=None):
        logits = self.last(input=self.again(torch.relu(self.first(x))))
        return {"logits": logits} | ({} if labels is None else {"loss": (logits - labels).square().mean()})


def test_batches_with_labels_need_no_loss():
    model, batch = Answering(), {"x": torch.randn(4, 6, WIDTH), "labels": torch.randn(4, 6, 8)}
    quantize(model, eager("mxfp8"), keep=["last"])
    found = probe(model, [batch])
    assert list(found.layers) == ["first"]
    assert 20 < found.layers["first"]["fprop.x"]["sqnr_db"] < 40
    assert not math.isnan(found.figures["gradient"]["error"])
    assert probe(model, batch, attribute=False).figures["loss"] == found.figures["loss"]  # a mapping is one batch
    with pytest.raises(ConfigError, match=r"^loss: must be given: the module returns no loss"):
        probe(model, [{"x": batch["x"]}])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"module": Model()}, r"^module: has no quantized layer. Call quantize"),
        ({"batches": []}, r"^batches: is empty"),
        ({"loss": None}, r"^loss: must be given for batches of Tensor"),
        ({"keys": 0}, r"^keys=0: must be an integer of at least 1"),
        ({"loss": lambda model, tokens: 1.0}, r"^loss: must return one number that depends"),
    ],
)
def test_wrong_arguments_are_named(changes, text):
    model = Model()
    quantize(model, eager("mxfp8"))
    given = {"module": model, "batches": token_batches(1)[0], "loss": loss, "keys": 1} | changes
    with pytest.raises(ConfigError, match=text):
        probe(given.pop("module"), given.pop("batches"), **given)
