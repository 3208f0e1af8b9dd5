"""Every shipped precision recipe takes its first steps to the recorded bits. 20 seconds at one thread."""

import re
from pathlib import Path

import pytest
import torch

from lightning_llm.precision.linear.operands import LinearCall
from tests.golden.trajectory import (
    HERE,
    RECIPES,
    distances,
    families,
    first_difference,
    kernels,
    recipes_of,
    recorded,
    trajectory,
)
from tests.precision.recipes import sample

ROUNDING = 5e-4
"""Largest relative difference between families of kernels; the recorded ones differ by 1.5e-4."""


@pytest.fixture(scope="module")
def family() -> str | None:
    """The family of kernels that this processor's are of, None for one that is not recorded."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    now = kernels()
    torch.set_num_threads(threads)
    return next((each for each in families() if recorded("fp32", each)[0] == now), None)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_every_recipe_is_recorded_somewhere_and_no_other():
    """A curve is recorded on a machine of its family, so newer recipes may be missing from a family."""
    assert sorted({recipe for name in families() for recipe in recipes_of(name)}) == RECIPES


@pytest.mark.parametrize("name", families())
def test_a_family_is_recorded_with_the_pinned_torch_and_the_same_kernels(name):
    heads = [recorded(recipe, name)[0] for recipe in recipes_of(name)]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["kernels"] == name
    pinned = re.search(r"^torch==(\S+)", (HERE.parents[1] / "requirements/dev.txt").read_text(), re.MULTILINE)
    assert heads[0]["torch"].split("+")[0] == pinned.group(1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_families_of_kernels_differ_by_rounding_alone(recipe):
    """So that a change of numbers that is meant is recorded on all of them."""
    first, *others = (recorded(recipe, each)[1] for each in families() if recipe in recipes_of(each))
    assert [max(distances(first, each)) < ROUNDING for each in others] == [True] * len(others)


@pytest.mark.parametrize("recipe", sample(RECIPES))
def test_the_first_steps_are_the_recorded_bits(recipe, family, cache):
    """On a processor without recorded kernels, the recorded numbers up to rounding."""
    now = trajectory(recipe, cache)
    if family is None or recipe not in recipes_of(family):
        other = next(each for each in families() if recipe in recipes_of(each))
        assert max(distances(recorded(recipe, other)[1], now)) < ROUNDING
    else:
        assert first_difference(recorded(recipe, family)[1], now) is None


def test_a_wrong_weight_gradient_is_caught_where_it_is(cache, monkeypatch):
    """As where a GEMM starts before the last chunk of its operand has come. On any machine's kernels."""
    right, then = LinearCall.operand, trajectory("mxfp8", cache).splitlines()

    def without_the_last_tokens(self, x, slot, axis):
        if slot == "wgrad.x":
            x = torch.cat([x[:-4], torch.zeros_like(x[-4:])])
        return right(self, x, slot, axis)

    monkeypatch.setattr(LinearCall, "operand", without_the_last_tokens)
    now = trajectory("mxfp8", cache).splitlines()
    changed = [old.split() for old, new in zip(then, now, strict=True) if old != new]
    assert changed[0][0] == "1"  # its gradient norm
    assert now[1].split()[1] == then[1].split()[1]  # no weight has been updated before the loss of step 1
    names = [words[0] for words in changed if "." in words[0]]
    linears = [line.split()[0] for line in then if re.match(r"layers.*_proj", line)]
    assert set(linears) <= set(names)
    first_steps = {line.split()[0]: line.split()[1] for line in now[6:]}
    for line in then[7:]:  # at step 1 the swapped layers' weights alone are wrong
        name, norm, *_ = line.split()
        assert (first_steps[name] == norm) == (name not in linears)
