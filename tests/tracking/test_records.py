import json
import math
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.base.integrity import ChainHead, RecordChain
from lightning_llm.tracking.files import cut_back, damaged_record, decode, encode, read_records, write_json
from tests.messages import missing


@given(st.floats(width=32))
def test_fp32_values_read_back_to_the_same_bits(value: float) -> None:
    line = encode({"step": 1, "loss": value})
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = decode(line)["loss"]
    if math.isnan(value):
        assert math.isnan(back)
    else:
        assert struct.pack("<f", back) == struct.pack("<f", value)


def test_non_finite_numbers_are_strings() -> None:
    line = encode({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": "nan?", "e": True})
    assert line == b'{"step": 1, "a": "nan", "b": "inf", "c": "-inf", "d": "nan?", "e": true}\n'


@pytest.mark.parametrize("torn", [b"", b'{"step": 5, "lo', b'{"step": 2, "loss": 1.0}'])
def test_cut_back_keeps_whole_lines_up_to_the_step(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [encode({"step": step, key: 0.1 * step}) for step in (1, 2, 3, 4) for key in ("loss", "val_loss")]
    path.write_bytes(b"".join(lines) + torn)
    assert cut_back(path, 3) == 6
    assert path.read_bytes() == b"".join(lines[:6])
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_cut_back_drops_a_torn_line_within_the_kept_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode({"step": 1}) + b'{"step": 2, "los')
    assert cut_back(path, 10) == 1
    assert path.read_bytes() == encode({"step": 1})


def test_cut_back_without_a_file_makes_an_empty_one(tmp_path: Path) -> None:
    assert cut_back(tmp_path / "metrics.jsonl", 4) == 0
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_damage_is_named_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    content = encode({"step": 1}) + b"\x00\x00\n" + encode({"step": 2})
    path.write_bytes(content)
    with pytest.raises(ValueError, match="line 2 is damaged"):
        cut_back(path, 1)
    assert path.read_bytes() == content


def test_an_interrupted_cut_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode({"step": 1}) + encode({"step": 2}))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cut_back(path, 1)
    assert [record["step"] for record in read_records(path)] == [1, 2]


def test_json_files_hold_no_bare_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"loss": math.inf, "inner": {"mfu": math.nan}})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": "inf", "inner": {"mfu": "nan"}}


def lines_of(steps: range) -> dict[int, list[bytes]]:
    """Return by step the line of its record, and of a validation at every third."""
    return {
        step: [encode({"step": step, "loss": 1 / step}), *([encode({"step": step, "val_loss": 2.0})] * (step % 3 == 0))]
        for step in steps
    }


@pytest.mark.parametrize(
    ("steps", "upto", "begun", "or_earlier", "problem"),
    [
        (range(1, 13), 12, 0, False, None),
        (range(1, 13), 9, 0, False, None),  # later steps are computed again
        (range(1, 13), 13, 0, False, "has no record of step 13"),
        (range(9, 13), 12, 8, False, None),
        (range(9, 13), 12, 7, False, "has no record of step 8"),
        (range(9, 13), 12, 10, False, None),
        (range(9, 13), 12, 10, True, None),  # an earlier release began the folder: at step 8, or later
        (range(9, 13), 12, 4, True, "has no records of steps 5-8"),
        (range(1, 13), 0, 0, False, None),
        (range(0), 2, 0, False, "has no records of steps 1-2"),
    ],
)
def test_a_checkpoint_without_metrics_of_all_its_steps_is_damaged(
    steps: range, upto: int, begun: int, or_earlier: bool, problem: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line for lines in lines_of(steps).values() for line in lines))
    assert damaged_record(path, upto, begun, or_earlier) == problem
    missing = damaged_record(tmp_path / "none", max(upto, 1), 0)
    assert missing is not None
    assert missing.startswith("is missing, with the record")


def test_the_chain_is_over_the_records_up_to_the_step_of_a_checkpoint(tmp_path: Path) -> None:
    path, lines = tmp_path / "metrics.jsonl", lines_of(range(1, 13))
    path.write_bytes(b"".join(line for each in lines.values() for line in each))
    for step in (8, 9, 10):
        head = ChainHead.over(line for at, each in lines.items() if at <= step for line in each)
        assert damaged_record(path, step, 0, written=head) is None
        assert damaged_record(path, step - 1, 0, written=head) is not None
        assert damaged_record(path, step + 1, 0, written=head) is not None
    assert damaged_record(path, 0, 0, written=ChainHead(3)) is None  # nothing was recorded before the first step
    edited = path.read_bytes().replace(encode({"step": 4, "loss": 0.25}), encode({"step": 4, "loss": 0.26}))
    path.write_bytes(edited)
    problem = damaged_record(path, 10, 0, written=head)
    assert missing(str(problem), "step 10", "13 lines", "edited") == []


def test_the_chain_head_is_known_at_the_newest_step_and_the_one_before() -> None:
    lines = [(step, line) for step, each in lines_of(range(8, 12)).items() for line in each]
    chain = RecordChain(ChainHead.over([b"before\n"]))
    for count, (step, line) in enumerate(lines, 1):
        chain.add(step, line)
        for at in (step - 1, step, step + 1):
            expected = [line for other, line in lines[:count] if other <= at]
            assert chain.at(at) == ChainHead.over([b"before\n", *expected])
