"""Every shipped precision recipe takes its first steps to the recorded bits. 20 seconds at one thread."""

import re
from pathlib import Path

import pytest
import torch
from trajectory import HERE, RECIPES, first_difference, kernels, recorded, trajectory

from lightning_llm.precision.linear import LinearCall


@pytest.fixture(scope="module")
def same_kernels() -> None:
    """Skip, aloud, where the bits of torch itself are others than those that the curves were recorded with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    then, now = recorded("fp32")[0], kernels()
    torch.set_num_threads(threads)
    if then != now:
        pytest.skip(f"golden curves are not compared: recorded with {then}, here {now}")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_every_recipe_is_recorded_with_the_pinned_torch_and_the_same_kernels():
    assert sorted(file.stem for file in HERE.glob("*.txt") if file.name != "corpus.txt") == RECIPES
    heads = [recorded(recipe)[0] for recipe in RECIPES]
    assert all(head == heads[0] for head in heads)
    pinned = re.search(r"^torch==(\S+)", (HERE.parents[1] / "requirements/dev.txt").read_text(), re.MULTILINE)
    assert heads[0]["torch"].split("+")[0] == pinned.group(1)


ALIKE = ("mxfp4_sr_fp8", "mxfp4_sr_norht", "mxfp4_rht_rne", "nvfp4_all_blocks", "fp16_mxfp8_hybrid")
"""Other combinations of the casts that the others have: in `make test-full`."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(each, marks=pytest.mark.full) if each in ALIKE else each for each in RECIPES]
)
def test_the_first_steps_are_the_recorded_bits(recipe, same_kernels, cache):
    assert first_difference(recorded(recipe)[1], trajectory(recipe, cache)) is None


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
