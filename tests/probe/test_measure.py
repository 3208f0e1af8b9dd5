"""A small model with planted faults: the probe must find them, with figures by the definitions."""

import json

import pytest
import torch

from lightning_llm.cli.probe import ProbedModel, TokenBatch
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.precision import PrecisionConfig, slots_of
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.precision.cast import quantize
from lightning_llm.probe.figures import channel_outliers, figures
from lightning_llm.probe.measure import (
    TARGET,
    all_but_slot,
    gradient_error,
    layers_to_keep,
    local_sums,
    measure,
    slot_shares,
    worst,
)
from lightning_llm.probe.report import as_json, recipe_lines

SHAPE = compose_config(
    ["model=llama_tiny", "model.num_layers=2", "model.hidden_size=64", "model.num_heads=2", "model.num_kv_heads=2",
     "model.ffn_hidden_size=128", "model.vocab_size=128"]
).model  # fmt: skip
BAD, OTHER_BAD = "layers.1.feed_forward.up_proj", "layers.1.feed_forward.gate_proj"
MX = {"format": "e4m3", "block": "1x32", "scale": "e8m0_ceil"}
FOUR = {"format": "e2m1", "block": "1x32", "scale": "e8m0_floor"}
COARSE = {"format": "e2m1", "block": "tensor", "scale": "fp32"}


@pytest.fixture(scope="module")
def weights():
    model = Decoder(SHAPE)
    initialise(model, seed=0)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def batches():
    tokens = torch.randint(0, 128, (2, 2, 33), generator=torch.Generator().manual_seed(0))
    return [TokenBatch(each[:, :-1], each[:, 1:], None) for each in tokens]


def probed(weights, recipe):
    return ProbedModel(SHAPE, weights, recipe, batches(), torch.device("cpu"), seed=0)


def shipped(name, *more):
    return compose_config([f"precision={name}", "precision.casts=eager", *more]).precision


def recipe_of(**slots):
    values = {"name": "own", "compute_dtype": "bf16", "casts": "eager"}
    for slot, cast in slots.items():
        gemm, operand = slot.split("_")
        values.setdefault(gemm, {})[operand] = cast
    return PrecisionConfig.model_validate(values)


def test_the_reference_is_a_plain_fp32_pass(weights):
    plain = Decoder(SHAPE)
    plain.load_state_dict(weights)
    loss = sum(next_token_loss_sum(plain(b.tokens), b.labels) / 128 for b in batches())
    loss.backward()
    made = probed(weights, shipped("mxfp8")).reference()
    assert made.loss == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(made.gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_no_layer_quantised_is_the_high_pass_and_all_of_them_is_the_recipe(weights):
    model = probed(weights, shipped("mxfp4_sr_norht"))
    reference, high = model.reference(), model.high()
    without = model.quantized(3, kept=frozenset(model.layers))
    assert without.loss == high.loss
    assert all(torch.equal(without.gradients[name], each) for name, each in high.gradients.items())
    one, same, other = (gradient_error(model.quantized(key), reference) for key in (3, 3, 4))
    assert one == same != other


@pytest.mark.parametrize("name", ["mxfp8", "fp8_subchannel"])
def test_local_figures_are_those_of_float64(name, weights):
    model = probed(weights, shipped(name))
    model.high()
    sums = local_sums(model, keys=3)
    casts = slots_of(model.recipe)
    kept = model.tensors[BAD]
    x, dy = kept.x, kept.dy
    w = model.layers[BAD].weight.detach().bfloat16()

    def q(tensor, slot, axis):
        return quantize.quantize(tensor.float(), casts[slot], axis).dequantized.double()

    exact = {"Y": x.double() @ w.double().T, "dX": dy.double() @ w.double(), "dW": dy.double().T @ x.double()}
    cases = {
        "fprop.x": ("Y", q(x, "fprop.x", 1) @ w.double().T),
        "dgrad.w": ("dX", dy.double() @ q(w, "dgrad.w", 0)),
        "wgrad.dy": ("dW", q(dy, "wgrad.dy", 0).T @ x.double()),
        "dW": ("dW", q(dy, "wgrad.dy", 0).T @ q(x, "wgrad.x", 0)),
    }
    for column, (product, made) in cases.items():
        got, wanted = figures(sums[BAD][column]), exact[product]
        assert got["error"] == pytest.approx(((made - wanted).norm() / wanted.norm()).item() ** 2, rel=1e-3), column
        cosine = (made * wanted).sum() / made.norm() / wanted.norm()
        assert got["cosine"] == pytest.approx(cosine.item(), abs=1e-6)


def test_stochastic_products_are_unbiased_and_nearest_ones_are_not(weights):
    found = {}
    for name in ("mxfp4_sr_norht", "mxfp4_rne"):
        model = probed(weights, shipped(name))
        model.high()
        columns = [figures(sums) for layer in local_sums(model, keys=12).values() for sums in layer.values()]
        found[name] = [each["bias"] > each["bias_floor"] for each in columns if each]
    assert sum(found["mxfp4_sr_norht"]) < 0.15 * len(found["mxfp4_sr_norht"])
    assert all(found["mxfp4_rne"])


def test_a_planted_outlier_is_the_worst_and_keeping_its_layer_high_wins_back_the_gap(weights):
    """A channel of huge activations that no weight uses, under one scale per tensor: all other channels become zero."""
    spoilt = {name: tensor.clone() for name, tensor in weights.items()}
    spoilt["layers.1.feed_forward_norm.weight"][9] = 1e6
    for name in (BAD, OTHER_BAD):
        spoilt[f"{name}.weight"][:, 9] = 0
    whole = "precision.modules.first_blocks_high_precision=0", "precision.modules.last_blocks_high_precision=0"
    model = probed(spoilt, shipped("fp8_current", *whole))
    found = measure(model, model.reference(), None, keys=2, attribute=True)
    assert set(worst(found["layers"], 2)) == {(BAD, "fprop.x"), (OTHER_BAD, "fprop.x")}
    assert found["layers"][BAD]["fprop.x"]["sqnr_db"] < 3
    kept = found["keep_high"]
    assert kept["layers"][0] in (BAD, OTHER_BAD)
    assert kept["won_back"] >= TARGET
    assert set(list(kept["contributions"])[:2]) == {BAD, OTHER_BAD}
    # the claim, once more by itself
    reference, high = model.reference(), model.high()
    model.calibrate(None)
    floor, gap = gradient_error(high, reference), found["gradient"]["gap"]
    left = gradient_error(model.quantized(5, kept=frozenset(kept["layers"])), reference)
    assert 1 - (left - floor) / gap == pytest.approx(kept["won_back"], abs=1e-9)


def shares_of(weights, recipe):
    model = probed(weights, recipe)
    reference, high = model.reference(), model.high()
    whole, floor = gradient_error(model.quantized(0), reference), gradient_error(high, reference)
    return slot_shares(model, reference, high, whole, floor)


def test_the_only_quantised_slot_carries_all_of_the_gap(weights):
    shares = shares_of(weights, recipe_of(dgrad_dy=COARSE))
    assert list(shares) == ["dgrad.dy"]
    assert shares["dgrad.dy"].share_only == shares["dgrad.dy"].share_without == 1
    assert shares["dgrad.dy"].loss_gap_only == 0


@pytest.mark.parametrize("lossy", ["fprop_w", pytest.param("wgrad_x", marks=pytest.mark.full)])
def test_the_one_lossy_slot_of_six_carries_nearly_all_of_the_gap(lossy, weights):
    slots = dict.fromkeys(("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x"), MX)
    shares = shares_of(weights, recipe_of(**{**slots, lossy: COARSE}))
    assert len(shares) == 6
    for name, share in shares.items():
        if name == lossy.replace("_", "."):
            assert share.share_only == pytest.approx(1, abs=0.2)
            assert share.share_without == pytest.approx(1, abs=0.2)
        else:
            assert abs(share.share_only) < 0.06, name
            assert abs(share.share_without) < 0.06, name


def test_the_contributions_of_layers_are_those_measured_alone(weights):
    model = probed(weights, recipe_of(wgrad_x=FOUR))
    reference, high = model.reference(), model.high()
    whole, floor = gradient_error(model.quantized(0), reference), gradient_error(high, reference)
    kept = layers_to_keep(model, reference, whole, floor, keys=1)
    # wgrad's rounding stays in its own layer's gradient, so contributions add up
    assert sum(kept.contributions.values()) == pytest.approx(whole - floor, rel=0.05)
    fewest, total = 0, 0.0
    for contribution in kept.contributions.values():
        if total >= (TARGET + 0.01) * (whole - floor):
            break
        total, fewest = total + contribution, fewest + 1
    assert abs(len(kept.layers) - fewest) <= 1


def test_delayed_scales_are_those_of_the_text_or_of_the_checkpoint(weights):
    model = probed(weights, shipped("fp8_delayed"))
    model.high()
    model.calibrate(None)
    layer, seen = model.layers[BAD], model.tensors[BAD]
    expected = [448 / seen.x_amax, 448 / float(weights[f"{BAD}.weight"].abs().max()), 57344 / seen.dy_amax]
    assert layer.scale.tolist() == pytest.approx(expected, rel=1e-6)
    own = {BAD: {"scale": torch.tensor([1.0, 2.0, 4.0]), "amax_history": torch.zeros(1024, 3)}}
    model.calibrate(own)
    assert layer.scale.tolist() == [1.0, 2.0, 4.0]
    other = model.layers["layers.0.attention.q_proj"]
    assert other.scale[0] > 1


def test_fp16_gradients_are_scaled_as_in_training(weights):
    model = probed(weights, shipped("fp16_mxfp8"))
    reference, high = model.reference(), model.high()
    assert model.loss_scale >= 1024
    assert gradient_error(high, reference) < 1e-4
    assert gradient_error(model.quantized(0), reference) < 0.05


def test_a_non_finite_gradient_is_reported(weights):
    """Weights of NaN in one layer: no figure, no share, no layers, and a report all the same."""
    spoilt = {**weights, f"{BAD}.weight": torch.full_like(weights[f"{BAD}.weight"], float("nan"))}
    model = probed(spoilt, shipped("mxfp8"))
    found = measure(model, model.reference(), None, keys=1, attribute=True)
    assert found["keep_high"]["won_back"] is None
    assert found["slots"]["fprop.x"]["share_only"] is None
    lines = "\n".join(recipe_lines("mxfp8", found))
    assert "the recipe's gradient is not finite" in lines
    assert '"error": "nan"' in json.dumps(as_json(found), allow_nan=False)


def test_layers_with_casts_of_their_own_are_probed_with_these(weights):
    """Layers that a rule leaves unquantized, or gives MXFP8, have the figures of a probe of that recipe."""
    rules = '[{names: ["*.o_proj"], high: true}, {names: ["*.down_proj"], recipe: mxfp8}]'
    model = probed(weights, shipped("mxfp4_rne", f"precision.modules.casts={rules}"))
    model.high()
    assert "layers.0.attention.o_proj" not in model.layers
    assert model.quantized_slots == ["fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"]
    mixed, alone = local_sums(model, keys=1), {}
    for name in ("mxfp4_rne", "mxfp8"):
        other = probed(weights, shipped(name))
        other.high()
        alone[name] = local_sums(other, keys=1)
    for name, columns in mixed.items():
        wanted = alone["mxfp8" if "down_proj" in name else "mxfp4_rne"][name]
        assert {column: figures(sums) for column, sums in columns.items()} == {
            column: figures(sums) for column, sums in wanted.items()
        }
    without = all_but_slot(model.recipe, "dgrad.w")
    assert [without.casts_under(rule)["dgrad.w"].quantizes for rule in (None, 1)] == [False, False]
    assert [without.casts_under(rule)["dgrad.dy"].quantizes for rule in (None, 1)] == [True, True]
    reference = model.reference()
    assert slot_shares(model, reference, model.high(), 1.0, 0.0).keys() == set(model.quantized_slots)


def test_each_expert_is_measured_by_its_own_part_of_the_weight():
    shape = compose_config(
        ["model=moe_tiny", "model.num_layers=1", "model.hidden_size=64", "model.num_heads=2", "model.num_kv_heads=2",
         "model.blocks.moe.feed_forward.ffn_hidden_size=64", "model.blocks.moe.feed_forward.experts=4",
         "model.vocab_size=128"]
    ).model  # fmt: skip
    model = Decoder(shape)
    initialise(model, seed=0)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    bad, stack = "layers.0.feed_forward.experts.2.up_proj", "layers.0.feed_forward.experts.up_proj.weight"
    sides = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
    rule = {"names": [bad]} | {gemm: dict.fromkeys(operands, COARSE) for gemm, operands in sides.items()}
    values = shipped("mxfp8", "precision.modules.first_blocks_high_precision=0",
                     "precision.modules.last_blocks_high_precision=0").model_dump()  # fmt: skip
    values["modules"]["casts"] = [rule]
    probe = ProbedModel(shape, state, PrecisionConfig.model_validate(values), batches(), torch.device("cpu"), seed=0)
    assert torch.equal(probe.matrix(bad), state[stack][128:192])
    reference = probe.reference()
    parts = [reference.gradients[f"layers.0.feed_forward.experts.{number}.up_proj.weight"] for number in range(4)]
    assert stack not in reference.gradients
    assert [part.shape for part in parts] == [(64, 64)] * 4
    found = measure(probe, reference, None, 1, attribute=False)
    assert found["quantised_layers"] == 4 + 3 * 4
    experts = {name: its for name, its in found["layers"].items() if ".experts." in name}
    assert len(experts) == 12
    assert min(experts, key=lambda name: experts[name]["fprop.w"]["sqnr_db"]) == bad
    assert experts[bad]["dW"]["error"] > 3 * max(its["dW"]["error"] for name, its in experts.items() if name != bad)
    assert channel_outliers(probe)[bad].keys() == {"x", "w", "dy"}
