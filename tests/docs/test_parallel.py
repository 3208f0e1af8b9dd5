"""Pages on layouts and ranks: commands compose, the table has every layout. 4 seconds."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from lightning_llm.cli.command_line import _parser
from lightning_llm.config.compose import compose_config
from lightning_llm.plan.check import check_config

ROOT = Path(__file__).parents[2]
PAGES = [
    "reference/layouts", "explanation/parallelism", "explanation/same_bits", "howto/start_ranks",
    "howto/stop_and_resume", "howto/long_runs", "howto/slurm_script",
]  # fmt: skip
TEXT = "\n".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
LAYOUTS = {file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / "conf" / "parallel").glob("*.yaml")}


def commands():
    """Every command in a code block or within a line, as the words after `lightning-llm`, however it is started."""
    blocks = re.findall(r"^```sh\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    for line in [*lines, *re.findall(r"`(lightning-llm [^`\n]+)`", TEXT)]:
        _, starts, words = re.sub("lightning_llm", "lightning-llm", line).partition("lightning-llm ")
        assert starts, line
        yield words, "torchrun" in line or "srun" in line


@pytest.mark.parametrize(("command", "started_from_outside"), commands())
def test_commands_compose_and_pass_the_checks(command, started_from_outside):
    arguments = _parser().parse_args(shlex.split(command, comments=True))
    config = compose_config(arguments.overrides)
    if started_from_outside:
        assert "run.name" in command  # the default has the time in it, and ranks start one after the other
        config = config.model_copy(update={"world": 4})
    check_config(config)


def test_the_table_has_every_layout_with_its_degrees():
    """`docs/generate.py --check` compares the table itself."""
    rows = {
        cells[0].strip(" `"): cells
        for cells in (line.split("|")[1:-1] for line in TEXT.splitlines() if line[:2] == "| ")
        if len(cells) == 4
    }
    assert rows.keys() >= LAYOUTS.keys()
    for name, keys in LAYOUTS.items():
        assert rows[name][2].strip() == str(keys.get("zero_stage", 0))
        rest = [axis for axis in ("dp_replicate", "dp_shard") if axis in keys and keys[axis] is None]
        assert [axis for axis in ("dp_replicate", "dp_shard") if f"`{axis}` = the rest" in rows[name][3]] == rest
