"""The results in benchmarks/README.md are those of the newest files; missed targets have a reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import readme, results

ROWS: list[tuple[str, float | None, str]] = [
    ("ours, fp32, eager, tokens/s", 3000.0, ""),
    ("litgpt, fp32, eager, tokens/s", 2000.0, ""),
    ("train, fp32, tokens/s", 2900.0, ""),
    ("ours over the fastest, fp32, eager", 1.5, ">= 1.2"),
    ("peak bytes of ours over the leanest's", 1.25, "<= 1"),
    ("something else", 7.0, ""),
    ("another program", None, "not measured: it is not installed"),
]


def kept(folder: Path, day: str, name: str, rows: list[Any], **more: Any) -> None:
    """Write a file of results as an earlier day left it."""
    folder.mkdir(exist_ok=True)
    (folder / f"{day}-cpu-{name}.json").write_text(json.dumps({"machine": "m, 1 threads", "rows": rows, **more}))


def test_the_readme_has_the_newest_results_and_every_miss_has_its_reason() -> None:
    text, made = readme.README.read_text(), readme.rendered(benchmarks.BENCHMARKS)
    assert text.partition(readme.BEGIN)[2].partition(readme.END)[0].strip() == made.strip()
    assert readme.NO_REASON not in text


def test_contenders_stand_side_by_side_and_a_miss_is_bold_with_its_reason(tmp_path: Path) -> None:
    kept(tmp_path, "2026-01-02", "peers", [["old", 1.0, "<= 1"]])
    kept(tmp_path, "2026-01-03", "peers", [list(row) for row in ROWS], versions={"torch": "9.9"}, clock="cpu", beside=3)
    kept(tmp_path, "2026-01-04", "peers_2m", [["of another benchmark", 1.0, "<= 1"]])
    lines = readme.rendered(["peers", "planner"], tmp_path).splitlines()
    assert "| tokens/s, fp32, eager | ours | litgpt |" in lines
    assert "| | 3,000 | 2,000 |" in lines
    assert "| tokens/s, fp32, a process each | train |" in lines
    assert "| ours over the fastest, fp32, eager | 1.5 | >= 1.2 |" in lines
    assert "| peak bytes of ours over the leanest's | **1.25** | <= 1 |" in lines
    assert f"- `peak bytes of ours over the leanest's`: {readme.NO_REASON}." in lines
    assert not any("something else" in line or "old" in line.split() for line in lines)
    facts = " ".join(lines)
    assert 'ARGS="--cpu-time peers"' in facts
    assert "torch 9.9" in facts
    assert "3 processes wanted a core" in facts


def test_what_a_user_starts_stands_first_at_every_shape_that_was_measured_whole(tmp_path: Path) -> None:
    rows = [[name.format(dtype), 1.25, ">= 1.2"] for dtype in ("bf16", "fp32") for name in readme.AT_A_GLANCE]
    rows[3][1] = 1.1
    kept(tmp_path, "2026-01-03", "peers_2m", rows)
    kept(tmp_path, "2026-01-03", "peers", rows[1:])
    lines = readme.rendered(["peers", "peers_2m"], tmp_path).splitlines()
    table = [line for line in lines[: lines.index("### `peers`")] if line.startswith("| ")]
    assert table == [
        "| | bf16 | bf16, compiled | bf16, peak bytes | fp32 | fp32, compiled | fp32, peak bytes |",
        "| 2M, 8 x 256 tokens | 1.25 | 1.25 | 1.25 | **1.1** | 1.25 | 1.25 |",
    ]


@pytest.mark.parametrize(
    ("value", "target", "missed"),
    [
        (1.02, "<= 1.02", False),
        (1.03, "<= 1.02", True),
        (1.2, ">= 1.2", False),
        (1.19, ">= 1.2", True),
        (0.1, "below 0.1", True),
        (0.09, "< 0.1", False),
        (None, ">= 1", False),
        (2.0, "holds", False),
    ],
)
def test_targets_are_judged(value: float | None, target: str, missed: bool) -> None:
    assert readme.is_missed(("row", value, target)) == missed


def test_what_is_written_is_read_back_and_only_the_marked_part_is_replaced(tmp_path: Path) -> None:
    result = results.here("peers", ROWS, beside=0.5)
    file = results.write(result, tmp_path)
    found = results.newest("peers", tmp_path)
    assert found is not None
    assert (found.rows, found.file, found.beside) == (ROWS, file.name, 0.5)
    assert found.versions is not None
    assert "torch" in found.versions
    page = tmp_path / "README.md"
    page.write_text(f"before\n{readme.BEGIN}\nstale\n{readme.END}\nafter\n")
    readme.write(["peers"], page, tmp_path)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "stale" not in text
    assert "### `peers`" in text
