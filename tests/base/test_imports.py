"""Imports without garbage collection in a command alone, and torchmetrics that is imported late but complete."""

import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.parallel.rank_group import RankGroup

COLLECTING = """
import gc
from lightning_llm.base.process import slow_imports, take_process
OURS
with slow_imports():
    during = gc.isenabled()
print(during, gc.isenabled(), gc.get_freeze_count() > 0)
"""

CODE = """
import sys
import lightning_llm, lightning.pytorch as pl
print("transformers" in sys.modules, "scipy.signal" in sys.modules)
import torch, torchmetrics
from torchmetrics import Metric, MetricCollection
accuracy = torchmetrics.Accuracy(task="binary")
print(torchmetrics.__version__.count("."), issubclass(torchmetrics.Accuracy, Metric), isinstance(accuracy, Metric))
print(pl.core.module.Metric is torchmetrics.Metric, pl.core.module.MetricCollection is torchmetrics.MetricCollection)
print(float(accuracy(torch.tensor([1, 0, 1, 1]), torch.tensor([1, 0, 0, 1]))))
from torchmetrics.functional.text import bert_score
print(bert_score.__module__, torchmetrics.__loader__ is torchmetrics.__spec__.loader)
"""

OTHER_VERSION = {
    "__init__.py": "from torchmetrics.metric import Metric\nclass Accuracy(Metric): ...",
    "utilities.py": "from torchmetrics import needed_here_first",
    "metric.py": "class Metric: ...",
}


def facts_of_torchmetrics(code: str) -> list[str]:
    """Run `code` in this process; return the printed lines."""
    with redirect_stdout(StringIO()) as printed:
        exec(code, {})
    return printed.getvalue().splitlines()


def said_by(code: str) -> list[str]:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    return done.stdout.splitlines()


def test_lightning_gets_its_base_classes_and_a_user_every_metric() -> None:
    group = RankGroup(1)  # forked from a process that has imported Lightning, and no metric
    try:
        found = group.call(facts_of_torchmetrics, CODE)
    finally:
        group.close()
    assert found == [
        "False False",
        "2 True True",
        "True True",
        "0.75",
        "torchmetrics.functional.text.bert True",
    ]


@pytest.mark.full
def test_other_torchmetrics_versions_are_imported_completely(tmp_path: Path) -> None:
    (tmp_path / "torchmetrics").mkdir()
    for name, text in OTHER_VERSION.items():
        (tmp_path / "torchmetrics" / name).write_text(text)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import lightning_llm; from torchmetrics import Metric"
    code += "; import torchmetrics; print(issubclass(torchmetrics.Accuracy, Metric), Metric is torchmetrics.Metric)"
    assert said_by(code) == ["True True"]


@pytest.mark.parametrize(("own", "said"), [("take_process()", "False True True"), ("", "True True False")])
def test_only_a_process_of_one_command_imports_without_looking_for_garbage(own: str, said: str) -> None:
    assert said_by(COLLECTING.replace("OURS", own)) == [said]
