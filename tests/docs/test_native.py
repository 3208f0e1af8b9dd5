"""Pages on native precision and gpu-check: commands compose, the tables of checks and wheels are complete. 3 s."""

import re
import shlex
from pathlib import Path

from gpu_check.__main__ import _parser as gpu_check_parser
from gpu_check.checks import CHECKS, RUN_PACKAGES, TARGETS
from lightning_llm.cli.command_line import _parser
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.plan.check import check_config
from lightning_llm.precision.native.decide import LIBRARY
from lightning_llm.precision.native.express import MULTIPLES

ROOT = Path(__file__).parents[2]
PAGES = ["docs/reference/native.md", "docs/howto/gpu_check.md"]
TEXT = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
SHELL = "\n".join(re.findall(r"^```sh\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))


def test_commands_compose_and_can_be_planned():
    lines = [line for line in SHELL.splitlines() if line.startswith("lightning-llm ")]
    assert len(lines) == 3
    for line in lines:
        arguments = _parser().parse_args(shlex.split(line, comments=True)[1:])
        check_config(compose_config(arguments.overrides), to_train=False)
    assert f">={LIBRARY[0]}.{LIBRARY[1]},<{LIBRARY[0] + 1}" in SHELL


def test_the_table_has_every_check_with_its_share():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", TEXT, re.MULTILINE)
    assert rows == [(name, f"{check.share:g}") for name, check in CHECKS.items()]
    for line in re.findall(r"make gpu-check ARGS=\"([^\"]+)\"", TEXT):
        assert set(gpu_check_parser().parse_args(line.split()).checks) <= CHECKS.keys()
    for target in TARGETS:
        assert f"{target.at_least:g}" in TEXT
    assert re.search(r"^gpu-check:.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_wheels_are_what_the_machine_lacks():
    packages = set(re.findall(r"[\w-]+(?===|\s|$)", SHELL.replace("\\\n", " ")))
    assert packages >= {"hydra-core", "omegaconf", "antlr4-python3-runtime", "platformdirs", "pydantic-core"}
    assert {"hydra", "omegaconf", "platformdirs", "pydantic"} <= set(RUN_PACKAGES)
    assert "/carry/" in (ROOT / ".gitignore").read_text()


def test_what_it_says_of_backends_and_sizes_is_the_programs():
    values = PrecisionConfig.model_fields["backend"].annotation.__args__
    assert all(f"| `{value}`" in TEXT for value in values)
    assert MULTIPLES == {"delayed": 16, "current": 16, "subchannel": 128, "mxfp8": 32, "nvfp4": 32}
    assert "multiples of 16 for FP8 per tensor, 32 for MXFP8 and NVFP4, 128 for blocks of 128" in " ".join(TEXT.split())
