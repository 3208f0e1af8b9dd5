"""No verdict "lossless" comes from a sweep with damaged runs; each is named with the reason. 10 seconds."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import settings as budget
from hypothesis import strategies as st

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.base.integrity import ChainHead
from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.judge import compare_runs
from lightning_llm.compare.runs.read_runs import read_all
from lightning_llm.compare.terms import Terms
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_digest, flatten
from lightning_llm.config.yaml_file import write_config
from lightning_llm.tracking.files import mark_failed, sealed_records, write_json
from lightning_llm.tracking.reading import read_run
from lightning_llm.tracking.sweep_file import checked_sweep
from tests.compare.run_folders import curve, make_run, make_sweep, rewritten, verdicts

RECIPES = {"precision=bf16": 0.0, "precision=mxfp8": 0.0}


@pytest.fixture(scope="module", params=[True, False], ids=["verified", "of an earlier release"])
def sweep(request, tmp_path_factory) -> tuple[Path, bool]:
    folder = make_sweep(tmp_path_factory.mktemp("sweep") / "s", RECIPES, verified=request.param)
    return folder, request.param


def judged(folders: list[Path], sound: list) -> tuple[Comparison | None, str]:
    """Return the comparison of `sound` runs and those in `folders`, and all problems as text."""
    runs, problems = read_all(folders)
    try:
        comparison = compare_runs([*sound, *runs], Terms(), damaged=[Path(each.key) for each in problems])
    except ConfigError as error:
        return None, "\n".join(map(str, [*problems, *error.problems]))
    return comparison, "\n".join(map(str, [*problems, *comparison.problems]))


def edit_number(lines: list[bytes], at: int) -> None:
    """Change one digit of the loss, as a typing error would."""
    before, key, rest = lines[at].rpartition(b'loss": ')
    lines[at] = before + key + bytes([ord("1") if rest[:1] != b"1" else ord("2")]) + rest[1:]


def put(value: bytes) -> Callable[[list[bytes], int], None]:
    """Return a function that replaces the loss of a line by `value`."""

    def put_in(lines: list[bytes], at: int) -> None:
        record = json.loads(lines[at])
        key = "val_loss" if "val_loss" in record else "loss"
        lines[at] = json.dumps({**record, key: "HERE"}).encode().replace(b'"HERE"', value) + b"\n"

    return put_in


def swap(lines: list[bytes], at: int) -> None:
    other = (at + 7) % len(lines)
    lines[at], lines[other] = lines[other], lines[at]


def drop_key(lines: list[bytes], at: int) -> None:
    record = json.loads(lines[at])
    record.pop("tokens")
    lines[at] = json.dumps(record).encode() + b"\n"


DAMAGE: dict[str, Callable[[list[bytes], int], None]] = {
    "edit": edit_number,
    "duplicate": lambda lines, at: lines.insert(at, lines[at]),
    "drop": lambda lines, at: lines.__delitem__(at),
    "reorder": swap,
    "tear": lambda lines, at: lines.__setitem__(slice(at, None), [lines[at][: len(lines[at]) // 2]]),
    "tear within a letter": lambda lines, at: lines.__setitem__(slice(at, None), [b'{"text": "\xc3']),
    "blank line": lambda lines, at: lines.insert(at, b"\n"),
    "byte order mark": lambda lines, at: lines.insert(0, b"\xef\xbb\xbf" + lines.pop(0)),
    "line ends of another system": lambda lines, at: lines.__setitem__(at, lines[at][:-1] + b"\r\n"),
    "a key less": drop_key,
    **{f"loss {value[:12].decode()}": put(value) for value in (
        b"NaN", b"Infinity", b"-Infinity", b"1" + b"0" * 400, b"1" + b"0" * 5000, b"1e999", b"true", b'"3.1"', b"null",
        b"[3.1]", b"{}", b"-1",
    )},
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(sweep) -> list:
    return [read_run(sweep[0] / str(number)) for number in range(6)]


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("room")


def check(comparison: Comparison | None, told: str, folder: Path, verified: bool) -> None:
    """Assert what holds of every sweep with a damaged run in `folder`; without digests some damage cannot be seen."""
    decisions = [] if comparison is None else [verdict.decision for verdict in comparison.verdicts]
    named = f"{folder}: cannot be read as a run: " in told
    if verified:
        assert "lossless" not in decisions
        assert named
    elif "lossless" in decisions:
        assert not named
        assert all("records not verified" in verdict.qualified for verdict in comparison.verdicts)
        assert comparison.as_data()["verdicts"][0]["records_verified"] is False


@budget(max_examples=60)
@example(number=0, kind="duplicate", at=119)
@example(number=4, kind="tear", at=119)
@example(number=1, kind="drop", at=60)
@example(number=5, kind="loss 100000000000", at=119)
@given(number=st.integers(0, 5), kind=st.sampled_from(sorted(DAMAGE)), at=st.integers(0, 119))
def test_damaged_records_are_named_and_nothing_is_lossless_beside_them(sweep, sound, room, number, kind, at):
    source, verified = sweep
    folder = room / f"{number}-{verified}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source / str(number), folder)
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    DAMAGE[kind](lines, at)
    file.write_bytes(b"".join(lines))
    comparison, told = judged([folder], [run for place, run in enumerate(sound) if place != number])
    check(comparison, told, folder, verified)


@budget(max_examples=20)
@given(
    key=st.sampled_from(["seed", "optim.learning_rate", "precision.name", "data.sequence_length", "model.num_layers"]),
    value=st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([1]), st.just({})
    ),
)
def test_an_edited_config_is_named(sweep, sound, room, key, value):
    source, verified = sweep
    folder = room / f"config-{verified}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source / "3", folder)
    tree = yaml.load((folder / "config.yaml").read_text(), yaml.CSafeLoader)
    group, _, name = key.rpartition(".")
    (tree[group] if group else tree)[name] = value
    (folder / "config.yaml").write_text(yaml.dump(tree, Dumper=yaml.CSafeDumper))
    comparison, told = judged([folder], [run for run in sound if run.folder.name != "3"])
    check(comparison, told, folder, verified)


@pytest.mark.parametrize("seed", ["3", "0.5", "yes"])
def test_a_copy_under_another_seed_is_not_counted_as_a_seed(sweep, sound, tmp_path, seed):
    copy = tmp_path / "copy"
    shutil.copytree(sweep[0] / "3", copy)
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("\nseed: 0\n", f"\nseed: {seed}\n"))
    comparison, told = judged([copy], sound)
    assert str(copy) in told
    assert [verdict.decision for verdict in comparison.verdicts] == ["inconclusive"]
    assert verdicts_pairs(comparison) <= 3


def verdicts_pairs(comparison: Comparison) -> int:
    return len(comparison.verdicts[0].judged.measured.seeds)


def test_copies_are_known_by_their_run_ids_and_by_their_losses(tmp_path):
    for seed in range(3):
        for precision, gap in (("bf16", 0.0), ("mxfp8", 0.001)):
            about = {"run_id": f"{precision}{seed}".ljust(32, "0")}
            words = (f"precision={precision}", f"seed={seed}")
            make_run(tmp_path / f"{precision}{seed}", *words, gap=gap, noise=seed, summary=about)
    make_run(tmp_path / "id", "precision=mxfp8", "seed=3", noise=9, summary={"run_id": "mxfp81".ljust(32, "0")})
    same = make_run(tmp_path / "same", "precision=mxfp8", "seed=4")
    lines = (tmp_path / "mxfp82" / "metrics.jsonl").read_bytes()
    (same / "metrics.jsonl").write_bytes(lines)
    rewritten(same)
    comparison, told = judged(sorted(tmp_path.iterdir()), [])
    for one, other, why in (
        ("id", "mxfp81", "has the run id of"), ("mxfp81", "id", "has the run id of"),
        ("same", "mxfp82", "has all losses of"), ("mxfp82", "same", "has all losses of"),
    ):  # fmt: skip
        assert f"{tmp_path / one}: {why} {tmp_path.name}/{other}" in told
    assert verdicts_pairs(comparison) == 1
    comparison, told = judged([each for each in sorted(tmp_path.iterdir()) if each.name[-1].isdigit()], [])
    assert (told, verdicts_pairs(comparison)) == ("", 3)


@pytest.mark.parametrize("key", ["records", "data_hash", "seed", "config_digest", "run_id"])
def test_keys_removed_from_a_summary_are_reported(tmp_path, key):
    run = make_run(tmp_path / "run", summary={"run_id": "a" * 32})
    known = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({name: value for name, value in known.items() if name != key}))
    with pytest.raises(ConfigError, match=r"cannot be read as a run: (summary.json|config.yaml) was changed"):
        read_run(run)


def test_contradictions_are_named_without_digests_too(tmp_path):
    def damaged(change: Callable[[list[dict]], object]) -> str:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        make_run(folder, verified=False)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        change(records)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        with pytest.raises(ConfigError) as error:
            read_run(folder)
        return str(error.value).partition("cannot be read as a run: ")[2]

    assert damaged(lambda r: r.insert(1, {**r[0], "loss": 4.0})) == "metrics.jsonl has step 1 twice"
    twice = damaged(lambda r: r.append({**r[-1], "val_loss": 4.0}))
    assert twice.startswith("metrics.jsonl has val_loss twice at step 100: 3.0")
    assert twice.endswith(" and 4.0")
    assert damaged(lambda r: r.__delitem__(slice(20, 51))) == "metrics.jsonl has no records of steps 18-43"
    assert damaged(lambda r: r.append({**r[-1], "step": 120})) == (
        "metrics.jsonl has a validation at step 120, after its last step 100"
    )
    assert damaged(lambda r: r.__delitem__(-1)) == (
        "its status is finished, but metrics.jsonl has no validation at step 100"
    )
    assert damaged(lambda r: r.__setitem__(5, {**r[5], "val_loss": True})) == (
        "'val_loss' at step 5 is not a number: 'True'"
    )


def test_a_torn_run_is_refused_and_named_by_the_command(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", RECIPES)
    file = sweep / "3" / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    found = verdicts(capsys, sweep, expect=2)
    assert f"{sweep}/3: cannot be read as a run: metrics.jsonl ends in an incomplete line" in found["stderr"]
    row = found["by_name"]["mxfp8"]
    assert (row["qualified"], row["damaged"]) == ("inconclusive (damaged runs)", [str(sweep / "3")])
    assert "another run is damaged, so no recipe is called lossless" in row["line"]
    assert any("With damaged runs no recipe is called lossless" in note for note in found["notes"])


@pytest.mark.usefixtures("undrawn")
def test_runs_of_an_earlier_release_are_judged_as_not_verified(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", RECIPES, verified=False)
    assert main(["compare", str(sweep)]) == 0
    told = capsys.readouterr().out
    assert "lossless (records not verified)" in " ".join(told.split())
    assert "; records not verified (6 of 6 runs)" in told
    assert "Records not verified, since an earlier release wrote them, or their digests were removed: s/0, s/3" in told
    data = json.loads((sweep / "compare" / "compare.json").read_text())
    assert [run["records_verified"] for run in data["runs"]] == [False] * 6
    assert any("were not verified" in text for text in data["methods"])
    assert "records not verified" in (sweep / "compare" / "report.html").read_text()


@pytest.mark.usefixtures("undrawn")
def test_nothing_that_runs_name_reaches_the_terminal_raw(tmp_path, monkeypatch):
    """An escape sequence would colour a verdict, a newline forge one."""
    forged = "\x1b]0;title\x07\x1b[32mevil\n  evil: lossless against fp32\u202e"
    sweep = tmp_path / "s\x1b[31m"
    make_sweep(sweep, {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    for folder in sorted(sweep.iterdir())[3:]:
        tree = yaml.load((folder / "config.yaml").read_text(), yaml.CSafeLoader)
        tree["precision"]["name"] = forged
        (folder / "config.yaml").write_text(yaml.dump(tree, Dumper=yaml.CSafeDumper))
        rewritten(folder, device=forged, data_hash=forged, host=forged)
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    main(["compare", str(sweep)])
    main(["compare", str(sweep), "--metric", "nosuch"])
    main(["diff", str(sweep / "0"), str(sweep / "3")])
    main(["compare", str(sweep), "--time-to-target", "--target", "4"])
    told = out.getvalue() + err.getvalue()
    assert "\\x1b[32mevil\\n" in told
    assert not set("\x1b\x07\u202e") & set(told)
    assert not any(line.strip().startswith("evil") for line in told.splitlines())


def test_a_non_finite_validation_in_between_is_reported(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", RECIPES)
    shutil.rmtree(sweep / "4")
    losses = {step: curve(step) + 0.1 for step in range(5, 101, 5)} | {40: float("nan")}
    make_run(sweep / "4", "precision=mxfp8", "seed=1", losses=losses)
    notes = verdicts(capsys, sweep)["notes"]
    assert "s/4 had a validation loss that was not finite at step 40." in notes


def test_an_edited_end_is_named_and_a_failure_found_later_is_no_edit(tmp_path):
    run = make_run(tmp_path / "run")
    known = json.loads((run / "summary.json").read_text())
    for edit in ({"status": "stopped"}, {"status": "failed", "detail": "NonFiniteError: step 3"}, {"detail": "x"}):
        (run / "summary.json").write_text(json.dumps(known | edit))
        with pytest.raises(ConfigError, match=r"summary.json was changed: its status or detail does not"):
            read_run(run)
    mark_failed(run, "OSError: rank 1")  # earlier edits stay detected
    with pytest.raises(ConfigError, match="its status or detail"):
        read_run(run)
    (run / "summary.json").write_text(json.dumps(known))
    mark_failed(run, "OSError: rank 1")
    assert (read_run(run).status, read_run(run).unverified) == ("failed", "")


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_lost_its_config_is_damaged_and_not_absent(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", RECIPES)
    (sweep / "4" / "config.yaml").unlink()
    for words in ([sweep], [*sorted(sweep.glob("[0-9]"))]):
        found = verdicts(capsys, *words, expect=2)
        assert f"{sweep}/4: cannot be read as a run: config.yaml is missing" in found["stderr"]
        assert found["by_name"]["mxfp8"]["qualified"] == "inconclusive (damaged runs)"


@pytest.mark.usefixtures("undrawn")
def test_a_run_copied_over_another_job_of_its_sweep_is_named(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", RECIPES)
    for folder in sweep.iterdir():
        rewritten(folder, run_id=folder.name * 32)
    jobs = [
        {"number": n, "words": [f"precision={('bf16', 'mxfp8')[n // 3]}"], "key": str(n), "seed": n % 3, "kind": "k"}
        for n in range(6)
    ]
    (sweep / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    assert verdicts(capsys, sweep)["by_name"]["mxfp8"]["qualified"] == "lossless"
    for source, target, why in (
        ("4", "3", "contains a run of seed 1, but the job in sweep.json has seed 0"),
        ("0", "3", "has the run id of another job of its sweep"),
    ):
        copy = tmp_path / f"{source} over {target}"
        shutil.copytree(sweep, copy)
        shutil.rmtree(copy / target)
        shutil.copytree(copy / source, copy / target)
        found = verdicts(capsys, copy, expect=2)
        assert why in found["stderr"]
        assert all(row["qualified"].startswith("inconclusive") for row in found["verdicts"])


@pytest.mark.parametrize("edit", [{"seed": None}, {"seed": "x"}, {"seed": True}, {"kind": [1]}, {"branch_from": [1]}])
def test_an_invalid_job_entry_makes_a_sweep_damaged(edit):
    job = {"number": 0, "words": [], "key": "k", "seed": 0, "kind": "a"}
    assert checked_sweep({"jobs": [job]})["jobs"] == [job]
    with pytest.raises(ValueError, match="it is damaged: jobs with an invalid"):
        checked_sweep({"jobs": [job | edit]})


@pytest.mark.parametrize("text", ["a${b}", "a\\${b}", "${oc.env:HOME}\\\\${c}", "plain\\"])
def test_marks_of_an_interpolation_change_no_config(tmp_path, text):
    """config.yaml has them escaped, for readers that interpolate; the recorded digest is of the config itself."""
    config = compose_config(["recipe=quickstart"])
    sources = {name: each.model_copy(update={"text_key": text}) for name, each in config.data.sources.items()}
    config = config.model_copy(update={"data": config.data.model_copy(update={"sources": sources})})
    folder = make_run(tmp_path / "0", "seed=0", summary={"status": "failed"})
    write_config(config, folder / "config.yaml")
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"seed": config.seed, "config_digest": config_digest(flatten(config.model_dump()))}
    head = ChainHead.over((folder / "metrics.jsonl").read_bytes().splitlines(keepends=True))
    write_json(folder / "summary.json", {**summary, "records": sealed_records(head, summary)})
    assert read_run(folder).unverified == ""


@pytest.mark.parametrize("key", ["init", "distil", "data_hash", "validation_hash", "validation_hashes", "code_hash"])
@pytest.mark.parametrize("value", [7, [1]])
def test_a_summary_of_odd_types_is_a_damaged_run(tmp_path, key, value):
    run = make_run(tmp_path / "run", summary={key: value}, verified=False)
    with pytest.raises(ConfigError, match=f"summary.json is damaged: '{key}' is"):
        read_run(run)
