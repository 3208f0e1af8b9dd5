"""Branches of parent runs: scope of the verdict, replicates, and pairs that are not controlled."""

import json
import shutil

import pytest

from lightning_llm.compare.runs.differences import equivalent_starts
from lightning_llm.compare.runs.losses import tail_of
from lightning_llm.tracking.reading import Run, read_run
from tests.compare.run_folders import EVERY, NOISE, STEPS, curve, make_run, rewritten, verdicts

pytestmark = pytest.mark.usefixtures("undrawn")

BEGUN = 80


def make_branch(folder, precision, trunk, *, seed, gap=0.0, noise=0.0, step=BEGUN, trunk_seed=None):
    """A branch of its last steps: as far from the trunk's curve as it is from the trunk."""
    about = {
        "digest": f"{trunk}-{step}",
        "step": step,
        "run_id": trunk,
        "seed": seed if trunk_seed is None else trunk_seed,
    }
    drift = {at: (at - step) / (STEPS - step) for at in range(step + EVERY, STEPS + 1, EVERY)}
    losses = {at: curve(at) + 0.1 * seed + (gap + noise) * share for at, share in drift.items()}
    words = (f"precision={precision}", f"branch_from=/runs/{trunk}/checkpoints/step={step}", f"seed={seed}")
    make_run(folder, *words, losses=losses, summary={"branch": about, "begun_at_step": step})
    lines = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] > step]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rewritten(folder)


def make_branches(folder, blocks, gaps=(("bf16", 0.0), ("mxfp8", 0.0), ("mxfp4_sr", 0.1))):
    """Branches of each recipe for each (trunk, seed, the trunk's seed) of `blocks`."""
    number = 0
    for place, (precision, gap) in enumerate(gaps):
        for index, (trunk, seed, trunk_seed) in enumerate(blocks):
            noise = NOISE[(index + 2 * place) % len(NOISE)]
            made = folder / str(number)
            make_branch(made, precision, trunk, seed=seed, gap=gap, noise=noise, trunk_seed=trunk_seed)
            number += 1
    return folder


def test_verdicts_over_branches_are_limited_to_late_switching(tmp_path, capsys):
    folder = make_branches(tmp_path / "s", [("a", 0, 0), ("b", 1, 1), ("c", 2, 2)])
    found = verdicts(capsys, folder)
    assert found["factor"] == "precision"
    good, bad = found["by_name"]["mxfp8"], found["by_name"]["mxfp4_sr"]
    assert (good["verdict"], bad["verdict"]) == ("lossless", "lossy")
    for row in (good, bad):
        assert (row["pairs"], row["controlled"], row["setting"]) == (3, True, {})
        assert row["qualified"] == f"{row['verdict']} (late switching)"
        holds = f"holds for late switching only: from step {BEGUN} of {STEPS}, over 3 parent runs"
        assert row["line"].endswith(f"; {holds}")
        assert row["late_switching"] == {
            "steps": [BEGUN], "max_steps": [STEPS], "trunks": 3, "seeds": 3, "holds_for": holds,
        }  # fmt: skip
    assert any(note.startswith("Branches share everything before") for note in found["notes"])
    assert not any("one parent run" in note or "resumed from another folder" in note for note in found["notes"])
    assert holds in (folder / "compare" / "verdicts.csv").read_text()
    assert holds in (folder / "compare" / "report.html").read_text()


def test_whole_runs_are_not_limited_to_late_switching(tmp_path, capsys):
    for number, precision in enumerate(("bf16", "mxfp8")):
        make_run(tmp_path / str(number), f"precision={precision}")
    row = verdicts(capsys, tmp_path)["by_name"]["mxfp8"]
    assert row["late_switching"] is None
    assert "late switching" not in row["line"] + row["qualified"]


def test_seeds_after_one_parent_run_only_cover_that_run(tmp_path, capsys):
    folder = make_branches(tmp_path / "s", [("a", seed, 0) for seed in (0, 1, 2)])
    found = verdicts(capsys, folder)
    row = found["by_name"]["mxfp8"]
    assert (row["pairs"], row["controlled"]) == (3, True)
    assert row["line"].endswith("after one parent run, over 3 seeds")
    assert any(note.startswith("All branch off one parent run") for note in found["notes"])


def test_seeds_after_several_parent_runs_are_no_replicates(tmp_path, capsys):
    """Six pairs of two trunks would make an interval of six, and there are two trunks."""
    blocks = [(trunk, seed, trunk_seed) for trunk, trunk_seed in (("a", 0), ("b", 1)) for seed in (5, 6, 7)]
    folder = make_branches(tmp_path / "s", blocks, gaps=(("bf16", 0.0), ("mxfp8", 0.0)))
    found = verdicts(capsys, folder)
    assert [row["pairs"] for row in found["verdicts"]] == [3, 3]
    assert {row["setting"]["branch_from"] for row in found["verdicts"]} == {
        f"/runs/{trunk}/checkpoints/step={BEGUN}" for trunk in ("a", "b")
    }
    assert all(row["controlled"] for row in found["verdicts"])


def test_branches_off_other_steps_or_trunks_are_not_controlled(tmp_path, capsys):
    make_branch(tmp_path / "0", "bf16", "a", seed=0)
    make_branch(tmp_path / "1", "mxfp8", "a", seed=0, step=60)
    make_branch(tmp_path / "2", "mxfp4_sr", "b", seed=0)
    make_run(tmp_path / "3", "precision=fp8_delayed")
    found = verdicts(capsys, tmp_path)["by_name"]
    assert {row["key"] for row in found["mxfp8"]["confounders"]} == {"branch.digest", "branch.step", "branch_from"}
    assert "from step 60 or 80" in found["mxfp8"]["line"]
    assert {row["key"] for row in found["mxfp4_sr"]["confounders"]} == {"branch.digest", "branch_from"}
    assert (
        "not controlled: the runs also differ in branch.digest, branch.step, branch_from"
        in found["fp8_delayed"]["line"]
    )
    assert not any(row["controlled"] for row in found.values())


def test_a_parent_run_branched_off_another_is_no_replicate(tmp_path):
    """They share their first steps, independent of their seeds."""

    def run(digest, seed, root):
        about = {"digest": digest, "step": 8, "seed": seed, "run_id": digest, "root_run_id": root}
        return Run(tmp_path, {"branch_from": f"/{digest}", "seed": seed}, {"branch": about})

    assert equivalent_starts([run("x", 0, "x"), run("y", 1, "y")]) == ("branch_from",)
    assert equivalent_starts([run("x", 0, "x"), run("y", 1, "x")]) == ()


def test_one_parent_run_at_two_paths_counts_once(tmp_path):
    def run(path, digest, seed=0):
        about = {"digest": digest, "step": 8, "seed": seed}
        return Run(tmp_path, {"branch_from": path, "seed": seed}, {"branch": about})

    one, moved, other = run("/a", "x"), run("/b", "x"), run("/a", "y")
    assert equivalent_starts([one, moved]) == ("branch_from",)
    assert equivalent_starts([one, other]) == ()
    assert equivalent_starts([one, run("/c", "z", seed=1)]) == ("branch_from",)
    assert equivalent_starts([one, Run(tmp_path, {"seed": 0}, {})]) == ()


def test_the_tail_is_of_the_branch_s_own_steps(tmp_path):
    """The last tenth of all steps would begin where recipes have hardly begun to differ."""
    make_branch(tmp_path / "0", "bf16", "a", seed=0, step=90)
    branch = read_run(tmp_path / "0")
    assert sorted(branch.validations["val_loss"]) == [95, 100]
    tail = tail_of([branch], "val_loss", 0.5)
    assert tail is not None
    assert tail.steps == (100,)
    make_run(tmp_path / "1")
    whole = tail_of([read_run(tmp_path / "1")], "val_loss", 0.5)
    assert whole is not None
    assert whole.steps == tuple(range(55, STEPS + 1, EVERY))


def test_a_parent_run_without_its_branch_is_missing(tmp_path, capsys):
    folder = make_branches(
        tmp_path / "s", [("a", 0, 0), ("b", 1, 1), ("c", 2, 2)], gaps=(("bf16", 0.0), ("mxfp8", 0.0))
    )
    jobs = []
    for number in range(6):
        config = read_run(folder / str(number)).config
        jobs.append(
            {"number": number, "words": [], "key": str(number), "seed": config["seed"],
             "kind": config["precision.name"], "branch_from": config["branch_from"]}
        )  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    shutil.rmtree(folder / "5")
    row = verdicts(capsys, folder, expect=2)["by_name"]["mxfp8"]
    assert (row["verdict"], row["missing_seeds"]) == ("inconclusive", [2])
