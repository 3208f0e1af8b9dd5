"""The commands of README and docs compose and pass the checks, links and make targets exist. 20 seconds."""

import re
import shlex
import struct
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.cli.command_line import _parser
from lightning_llm.config.compose import compose_config
from lightning_llm.config.recipes import recipe_files
from lightning_llm.config.sweep_space import compose_sweep
from lightning_llm.data.scoring import COLUMNS, write_scores
from lightning_llm.data.tokens.tokenizer import write_bytes_tokenizer
from lightning_llm.plan.check import check_config
from lightning_llm.sweep.jobs import NOT_CHECKED
from tests.weight_folders import write_huggingface

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BENCHMARKS = ROOT / "benchmarks" / "README.md"


def commands(file: Path, program: str) -> list[str]:
    """Return every line of a code block, and all code within a line, that starts with `program`."""
    text = file.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    lines = [line for block in blocks for line in block.splitlines()]
    return [each for each in [*lines, *inline] if each.startswith(f"{program} ")]


DOCS = sorted((ROOT / "docs").rglob("*.md"))
PLACEHOLDERS = re.compile(r" (FILE|DIR|RUN|VERB|--help)\b|\.\.\.|\[|\{[a-z]")
WRONG = "model.hiden_size"
"""In a command that a page shows with its errors."""
THEIR_OWN = ("mine", "outputs/probe/mine-step=480")
"""--config-dir folders of the docs, which a reader makes."""


def commands_of_docs() -> list[str]:
    found = [each for file in (README, *DOCS) for each in commands(file, "lightning-llm")]
    whole = [each for each in found if not PLACEHOLDERS.search(each.partition("#")[0]) and not each.endswith("\\")]
    whole.remove("lightning-llm probe")  # a heading, not a command
    return list(dict.fromkeys(whole))


SHIPPED_SWEEP = re.compile(
    r" -m .*recipe=(sweep|ablate)/| -m .*sweep.search=optuna|--matrix$|^lightning-llm probe .*precision=all"
)
"""Commands with many jobs or recipes: tests/config/test_compose.py composes each shipped one; searches: tests/sweep."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.full) if SHIPPED_SWEEP.search(command) else command
        for command in commands_of_docs()
    ],
)
def test_commands_compose_and_pass_the_checks(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text('{"text": "mine"}\n')
    lay_named_inputs(command, tmp_path)
    laid = set(tmp_path.rglob("*"))
    words = shlex.split(command, comments=True)[1:]
    arguments = _parser().parse_args(words)
    if arguments.verb in ("recipes", "conformance") or str(getattr(arguments, "config_dir", None)) in THEIR_OWN:
        return
    if arguments.verb == "warm":  # compiles; tests/train/test_precision_runs.py
        assert len(compose_sweep(arguments.overrides)) > 1
        return
    if arguments.verb == "health":  # measures; tests/run/launch/test_health.py
        compose_config(arguments.overrides)
        return
    if arguments.verb == "prepare":  # reads all data; tests/data/test_samplemix.py
        compose_config([word for word in arguments.overrides if "=" in word])
        return
    if arguments.verb not in ("train", "plan", "golden"):  # others than config take folders that are not there
        assert main(words) == (0 if arguments.verb == "config" and WRONG not in command else 2)
        return
    if any(word.startswith("branch_from=") for word in words):  # nothing but their trunks, which are not there
        with pytest.raises(ConfigError) as refused:
            _ = compose_sweep(arguments.overrides) if arguments.multirun else compose_config(arguments.overrides)
        assert {problem.key for problem in refused.value.problems} == {"branch_from"}
        return
    if any(word.startswith("sweep.search=") for word in words):  # which checks the corners of its space
        assert main(["plan", *words[1:]]) == 0
        return
    if getattr(arguments, "multirun", False):
        configs = [config for _, config in compose_sweep(arguments.overrides)]
        assert len(configs) > 1
    elif getattr(arguments, "search", False):  # of all layouts, not the config's; tests/plan/search runs it
        configs = [compose_config([*arguments.overrides, "world=1"])]
    else:
        configs = [compose_config(arguments.overrides)]
    for config in {config.model_dump_json(exclude=NOT_CHECKED): config for config in configs}.values():
        check_config(config, to_train=arguments.verb == "train")
    assert set(tmp_path.rglob("*")) == laid


def lay_named_inputs(command: str, folder: Path) -> None:
    """Write the weights, texts and tokens that `command` names: without them it is refused, as it should be."""
    for name in re.findall(r"\bmodel\.init_from=(\S+)", command):
        write_huggingface(
            folder / name,
            compose_config(["model=llama_tiny", "model.num_layers=1", "model.max_sequence_length=2048"]).model,
        )
    for name in re.findall(r"\bdata\.mixture\.scores=(\S+)", command):
        write_scores(folder / name, {name: [] for name in COLUMNS}, {})
    for name in re.findall(r"\.path=(\w+\.jsonl)\b", command):
        (folder / name).write_text('{"text": "mine"}\n')
    for name in re.findall(r"\bdata\.sources\.megatron\.path=(\S+)", command):
        tokens = b"\x01\x00" * 4096
        (folder / f"{name}.bin").write_bytes(tokens)
        header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2)  # version, uint16, one sequence, two bounds
        (folder / f"{name}.idx").write_bytes(header + struct.pack("<iqqq", 4096, 0, 0, 1))
        write_bytes_tokenizer(folder / "tokenizer.json")


def test_the_readme_installs_and_runs_with_three_lines():
    shown = README.read_text(encoding="utf-8").partition("## Install and run")[2]
    block = re.search(r"^```\w*\n(.*?)^```", shown, re.DOTALL | re.MULTILINE).group(1)
    assert [line.split()[:2] for line in block.splitlines()] == [
        ["make", "setup"],
        ["make", "train"],
        ["make", "sweep"],
    ]


def test_the_readme_fits_two_screens():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    assert len(text.split()) <= 800


@pytest.mark.parametrize("file", [README, BENCHMARKS], ids=["README", "benchmarks"])
def test_make_targets_links_and_names_exist(file):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    recipes = {name for name, _ in recipe_files()}
    for command in commands(file, "make"):
        _, target, *variables = shlex.split(command, comments=True)
        assert target in targets, command
        for name in (each.removeprefix("RECIPE=") for each in variables if each.startswith("RECIPE=")):
            assert name in recipes, command
    text = file.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    assert [link for link in links if not (file.parent / link).exists()] == []
    if file == README:
        assert {"benchmarks/README.md", "docs/first_question.md", "docs/howto/choose_a_recipe.md"} <= set(links)


def test_every_benchmark_has_its_line():
    listed = re.findall(r"^\| `(\w+)` \|.*`make bench ARGS=(\w+)`", BENCHMARKS.read_text(), re.MULTILINE)
    program = (ROOT / "benchmarks" / "__main__.py").read_text()
    assert [name for name, _ in listed] == re.findall(
        r'^    "(\w+)": (?:partial\()?\w+\.measure', program, re.MULTILINE
    )
    assert all(name == argument for name, argument in listed)
