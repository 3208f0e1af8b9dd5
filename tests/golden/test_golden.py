"""Every shipped precision recipe takes its first steps to the recorded bits. 20 seconds at one thread."""

import re

import pytest
import torch
from trajectory import HERE, RECIPES, first_difference, kernels, recorded, trajectory

from lightning_llm.precision.linear import _Call


@pytest.fixture(scope="module")
def same_kernels() -> None:
    """Skip, aloud, where the bits of torch itself are others than those that the curves were recorded with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    then, now = recorded("fp32")[0], kernels()
    torch.set_num_threads(threads)
    if then != now:
        pytest.skip(f"golden curves are not compared: recorded with {then}, here {now}")


def test_every_recipe_is_recorded_with_the_pinned_torch_and_the_same_kernels():
    assert sorted(file.stem for file in HERE.glob("*.txt") if file.name != "corpus.txt") == RECIPES
    heads = [recorded(recipe)[0] for recipe in RECIPES]
    assert all(head == heads[0] for head in heads)
    pinned = re.search(r"^torch==(\S+)", (HERE.parents[1] / "requirements/dev.txt").read_text(), re.MULTILINE)
    assert heads[0]["torch"].split("+")[0] == pinned.group(1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_steps_are_the_recorded_bits(recipe, same_kernels, tmp_path):
    assert first_difference(recorded(recipe)[1], trajectory(recipe, tmp_path)) is None


def test_a_wrong_weight_gradient_is_caught_where_it_is(same_kernels, tmp_path, monkeypatch):
    right = _Call.operand

    def along_the_wrong_axis(self, x, slot, axis):
        return right(self, x, slot, 1 - axis if slot == "wgrad.x" else axis)

    monkeypatch.setattr(_Call, "operand", along_the_wrong_axis)
    then, now = recorded("mxfp8")[1].splitlines(), trajectory("mxfp8", tmp_path).splitlines()
    wrong = [old for old, new in zip(then, now, strict=True) if old != new]
    losses, gradients = (
        [old for old in wrong if re.match(r"\d", old)],
        [old.split()[0] for old in wrong if not re.match(r"\d", old)],
    )
    assert losses[0].startswith("1 ")  # its gradient norm; the loss of step 1 knows nothing yet
    assert now[1].split()[1] == then[1].split()[1]
    assert "layers.1.attention.q_proj.weight" in gradients or any("layers.1." in name for name in gradients)
