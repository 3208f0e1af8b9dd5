"""The report holds everything itself, each key is documented, and writing it takes no heavy import."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import verdicts

from lightning_llm.__main__ import main

pytestmark = pytest.mark.usefixtures("undrawn")


def test_the_report_holds_everything_itself(sweep, capsys):
    assert main(["compare", str(sweep)]) == 0
    out = capsys.readouterr().out
    assert "mxfp4_sr at 2.16M parameters" in out
    html = (sweep / "compare" / "report.html").read_text()
    assert html.count('src="data:image/svg+xml;base64,') == html.count("<img") == 3
    assert "http" not in html.replace("http://www.w3.org", "")
    assert all(word in html for word in ("Dunnett", "ICH E9", "inconclusive", "mxfp4_rne at"))
    found = json.loads((sweep / "compare" / "compare.json").read_text())
    assert all(f'<td class="number">{row["sd"]:.4f}</td>' in html for row in found["verdicts"])
    assert f'<td class="number">{found["baselines"][0]["loss"]:.4f}</td>' in html
    assert all(f'<td class="number">{row["gap_by_source"]["code"]:+.4f}</td>' in html for row in found["verdicts"])
    assert all(text.replace("'", "&#39;") in html for text in found["methods"])
    assert max(len(re.findall("<th", table)) for table in re.findall("<table>.*?</tr>", html, re.DOTALL)) <= 10


def test_every_key_of_a_verdict_is_in_the_document(sweep, capsys):
    text = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", text.split("## `compare.json`")[1]))
    assert set(verdicts(capsys, sweep)["verdicts"][0]) - {"confidence"} <= named


def test_neither_torch_nor_mlflow_is_imported(sweep):
    code = (
        "import sys; from lightning_llm.__main__ import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'mlflow', 'lightning', 'hydra', 'scipy.stats', 'pandas'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", str(sweep)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
