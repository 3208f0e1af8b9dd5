import json
import math
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.record.files import cut_back, decode, encode, read_records, write_json


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
