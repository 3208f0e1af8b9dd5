"""Incompatible flags are refused all at once; damage is reported, and the report is still written."""

import json

import pytest

from lightning_llm.__main__ import main
from lightning_llm.compare.recorded_looks import RecordedLook, record_look
from tests.compare.run_folders import make_sweep, refusal, verdicts

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--time-to-target --margin 0.1 --confidence 0.9 --tail 0.2 --best-of seed --ladder --target x",
            ("--best-of, --margin, --confidence, --tail, --ladder has no effect", "--target=x"),
        ),
        (
            "--ladder --all-pairs --target 4 --trials a --beyond 2 --ledger f --margin 2% --confidence 2 --choose-by 0",
            (
                "--all-pairs: has no effect", "--target: has no effect", "--trials: has no effect",
                "--beyond: has no effect without --predict", "--ledger: has no effect", "--margin=2%: must be in nats",
                "--confidence=2", "--choose-by: requires --best-of KEY",
            ),
        ),
        ("--grade --beyond 0", ("--beyond: has no effect", "--beyond=0: must be above 0")),
        (
            "--beyond 2 --ledger f --trials a --tail 3",
            ("--beyond: is an option of", "--ledger: is an option of", "--trials: is an option of", "--tail=3"),
        ),
        ("--all-pairs --margin 2%", ("--all-pairs: requires a margin in nats",)),
    ],
)  # fmt: skip
def test_ignored_keys_are_refused_all_at_once(words, said, sweep, capsys):
    told = refusal(capsys, sweep, *words.split())
    assert [each for each in said if each not in told] == []


LOOK = {
    "at": "2026-11-24T00:00:00+00:00", "seen": "0" * 16, "margin": 0.01, "confidence": 0.95, "metric": "val_loss",
    "tail": 0.1, "pairs": {"mxfp8": 3}, "verdicts": {"mxfp8": "lossless"},
}  # fmt: skip


WRONG = [
    {"margin": "x"}, {"margin": None}, {"verdicts": ["lossless"]}, {"pairs": {"mxfp8": "3"}}, {"at": 3}, {"tail": True},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_looks_that_are_damaged_are_refused(wrong, tmp_path):
    (tmp_path / "looks.json").write_text(json.dumps({"looks": [LOOK | wrong]}))
    with pytest.raises(ValueError, match=r"looks.json is damaged: a look has no valid .*Restore it"):
        record_look(RecordedLook(**LOOK), tmp_path)


def test_a_damaged_looks_file_only_costs_a_note(sweep, capsys):
    file = sweep / "compare" / "looks.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"looks": [LOOK | {"verdicts": 3}]}))
    found = verdicts(capsys, sweep)
    assert any("looks.json is damaged: a look has no valid verdicts" in note for note in found["notes"])
    assert (file.parent / "report.html").is_file()
    assert "could not be made" not in found["stderr"]
    assert json.loads(file.read_text()) == {"looks": [LOOK | {"verdicts": 3}]}  # left for its owner
    file.unlink()


def test_a_look_by_a_margin_in_tokens_is_shown(sweep, capsys):
    file = sweep / "compare" / "looks.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"looks": [LOOK | {"margin": None, "token_margin": 0.02}]}))
    verdicts(capsys, sweep)
    assert "2 % of tokens" in (file.parent / "report.html").read_text()
    file.unlink()


@pytest.mark.parametrize("declared", [{}, None, []], ids=repr)
def test_removed_declared_looks_are_damage(declared, tmp_path, capsys):
    folder = make_sweep(tmp_path / "outputs" / "e" / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0}, seeds=2)
    jobs = [{"number": n, "key": str(n), "words": [], "kind": "k", "seed": n} for n in range(4)]
    (folder / "sweep.json").write_text(json.dumps({"jobs": jobs, "sequential": declared}))
    said = refusal(capsys, folder)
    assert "the declared looks ('sequential') cannot be used: it is damaged: it is empty" in said
    words = ["-m", "model=llama_tiny", "data=python", "precision=bf16,mxfp8", "logger=none", "run.name=s"]
    place = [f"run.root={tmp_path / 'outputs'}", "run.experiment=e"]
    assert main(["plan", *words, *place]) == 2
    assert "it is damaged: 'sequential' is not a mapping of declared terms" in capsys.readouterr().err


def test_all_pairs_are_in_every_form_of_the_report(sweep, capsys, tmp_path):
    found = verdicts(capsys, sweep, "--all-pairs", "--output", tmp_path)
    rows = (tmp_path / "pairs.csv").read_text().splitlines()
    assert rows[0] == "recipe,against,setting,verdict,controlled,margin,gap,ci_low,ci_high,pairs"
    assert len(rows) == 1 + len(found["all_pairs"]) == 7
    gap, low, high = map(float, rows[1].split(",")[6:9])
    assert [gap, low, high] == pytest.approx([found["all_pairs"][0]["gap"], *found["all_pairs"][0]["ci"]])
    assert (tmp_path / "pairs.tex").read_text().startswith("\\begin{tabular}{lllrrr}")
    assert "\\input{pairs}" in (tmp_path / "report.tex").read_text()
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Each against each</h2>" in page
    assert "pairs.csv (the gaps of all pairs)" in page
    assert "Tukey" in (tmp_path / "references.bib").read_text()
    assert any(each.startswith("All pairs. ") and "(Tukey 1953)" in each for each in found["methods"])
    verdicts(capsys, sweep, "--output", tmp_path)  # without them nothing is left of them
    assert not list(tmp_path.glob("pairs.*"))
    assert "Each against each" not in (tmp_path / "report.html").read_text()
