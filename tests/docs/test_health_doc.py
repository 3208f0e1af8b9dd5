"""docs/howto/machine_health.md names every figure that has a threshold and has the numbers of the slowness rule."""

import re
from pathlib import Path

from lightning_llm.cli.health import NAMES, read_thresholds
from lightning_llm.health.communication import BUS_FACTORS
from lightning_llm.health.devices import FORMATS
from lightning_llm.health.outliers import ALPHA, LEAST_SLOWDOWN, rounds_for

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "howto" / "machine_health.md").read_text(encoding="utf-8")
ONE_LINE = " ".join(TEXT.split())


def test_it_names_every_figure_and_its_file_is_one(tmp_path):
    kinds = {re.sub(r"gemm\.\w+", "gemm.FORMAT", name) for name in NAMES}
    others = {f"{name}.bus_gb_per_second" for name in list(BUS_FACTORS)[1:]}  # "and those of ..."
    assert [name for name in kinds - others if f"`{name}`" not in TEXT] == []
    assert [name for name in BUS_FACTORS if f"`{name}" not in TEXT] == []
    assert f"({', '.join(FORMATS)}; a CPU: fp32, bf16)" in TEXT
    (example,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "least.yaml").write_text(example)
    assert [each.is_share for each in read_thresholds(tmp_path / "least.yaml")] == [True, False, True, False]


def test_the_rule_has_the_numbers_of_the_code():
    assert f"more than {1 + LEAST_SLOWDOWN:g} times the median" in ONE_LINE
    assert f"chance below {ALPHA:g}" in ONE_LINE
    assert f"{rounds_for(12)} for 4 ranks" in ONE_LINE
