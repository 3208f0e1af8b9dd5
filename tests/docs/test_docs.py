"""The documents match the program: generated sections, commands, links, a user's recipe. 10 seconds."""

import importlib.util
import math
import re
import shlex
from pathlib import Path

import pytest
import torch

from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.cli.command_line import _parser
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.cast_kinds import GRADIENTS, ROUNDINGS, SCALES, TRANSFORMS
from lightning_llm.config.schema.casts import BLOCKS, FORMATS
from lightning_llm.config.sweep_space import compose_sweep
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.plan.check import check_config
from lightning_llm.plan.report import plan_facts
from lightning_llm.plan.resolve import plan_of
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.linear.delayed import update_delayed
from lightning_llm.precision.linear.module import set_step_key
from lightning_llm.precision.linear.swap import swap_linears
from lightning_llm.precision.lint import RULES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PRECISION = [
    "howto/write_precision_recipe", "reference/precision", "reference/precision_recipes", "explanation/emulation",
    "explanation/quantized_runs", "internals/casts",
]  # fmt: skip
TEXT = "\n".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in PRECISION)
FENCED = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
TINY = [
    "model=llama_tiny", "model.num_layers=1", "model.hidden_size=64", "model.num_heads=2", "model.num_kv_heads=1",
    "model.ffn_hidden_size=96", "model.vocab_size=320", "data.tokenizer.vocab_size=300",
]  # fmt: skip


def load_generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()


def commands():
    """Every `lightning-llm ...` in a code block or in code within a line."""
    lines = [line for _, block in FENCED for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE))
    return [each for each in [*lines, *inline] if each.startswith("lightning-llm ")]


@pytest.fixture(scope="module")
def own_recipe(tmp_path_factory):
    """The pages' YAML blocks, written where their first lines say; returns (folder of --config-dir, first name)."""
    folder = tmp_path_factory.mktemp("docs")
    places = []
    for block in (text for language, text in FENCED if language == "yaml"):
        places.append(Path(block.splitlines()[0].removeprefix("# ")))
        (folder / places[-1]).parent.mkdir(parents=True, exist_ok=True)
        (folder / places[-1]).write_text(block)
        assert places[-1].parent.name == "precision"
        assert len(block.splitlines()) <= 12
    return folder / places[0].parts[0], places[0].stem


def test_generated_sections_are_current():
    assert generate.regenerate(TEXT) == TEXT
    assert generate.main(["--check"]) == 0
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    documents = "".join(file.read_text(encoding="utf-8") for file in files)
    assert {name for _, name, _ in generate.SECTION.findall(documents)} == set(generate.SECTIONS)


def test_every_key_says_what_it_is():
    assert [key for key, field in generate.config_fields(Config) if not field.description] == []


def test_a_stale_section_is_noticed_and_mended(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    copy = tmp_path / "precision_recipes.md"
    page = (DOCS / "reference" / copy.name).read_text(encoding="utf-8")
    copy.write_text(page.replace("e2m1 16x16 e4m3", "e2m1 1x16 e4m3"))
    assert generate.main(["--check"]) == 1
    assert "precision_recipes.md: stale" in capsys.readouterr().out
    assert copy.read_text() != page
    assert generate.main([]) == 0
    assert copy.read_text() == page


def test_an_unknown_section_is_an_error():
    with pytest.raises(ValueError, match="no section 'weather'"):
        generate.regenerate("<!-- generated: weather -->\n<!-- /generated -->")


def test_the_tables_have_every_recipe_and_rule():
    names = {file.stem for file in (ROOT / "conf" / "precision").glob("*.yaml")}
    for table in (generate.recipe_slots(), generate.recipe_facts()):
        rows = [re.match(r"\| `(\w+)` \|", line).group(1) for line in table.splitlines()[2:]]
        assert set(rows) == names
        assert len(rows) == len(names)
    nvfp4 = "e2m1 1x16 e4m3 | e2m1 16x16 e4m3 | e2m1 1x16 e4m3 SR | e2m1 16x16 e4m3 | e2m1 1x16 e4m3 SR H16+ | "
    assert f"| `nvfp4` | {nvfp4}e2m1 1x16 e4m3 H16+ |" in TEXT
    assert "| `mxfp8` | all six: e4m3 1x32 ceil |" in TEXT
    rules = re.split(r"^(?=\d+\. )", generate.lint_rules(), flags=re.MULTILINE)[1:]
    assert [bool(re.search(r"<br>Source:\s+\S", rule)) for rule in rules] == [True] * len(RULES)


def test_every_value_a_cast_can_take_is_explained():
    for kind in (FORMATS, BLOCKS, SCALES, ROUNDINGS, TRANSFORMS, GRADIENTS):
        assert [value for value in kind if f"`{value}`" not in TEXT] == []


@pytest.mark.parametrize("command", [each for each in commands() if "--config-dir" in each or " conformance " in each])
def test_commands_with_own_files_parse_and_compose(command, own_recipe, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    arguments = _parser().parse_args(shlex.split(command, comments=True)[1:])
    if arguments.verb == "conformance":
        assert (ROOT / arguments.folder / "manifest.json").is_file()
        return
    folder = None
    if arguments.config_dir is not None:
        folder = own_recipe[0]
        assert str(arguments.config_dir) == folder.name
    if getattr(arguments, "multirun", False) or arguments.verb == "warm":
        configs = [config for _, config in compose_sweep(arguments.overrides, folder)]
        assert len(configs) > 1
    else:
        configs = [compose_config(arguments.overrides, folder)]
    for config in configs:
        check_config(config)


def test_the_pages_show_commands_and_the_picture_of_the_slots():
    assert "](../pictures/six_slots.svg)" in TEXT
    assert {each.split()[1] for each in commands()} >= {"plan", "train", "conformance"}


def test_lines_are_short_enough_to_read_and_review():
    """Except rows of tables, which Markdown keeps on one line, and printed output (```text)."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    texts = {page: re.sub(r"^```text\n.*?^```", "", page.read_text(), flags=re.DOTALL | re.M) for page in pages}
    lines = [(name, line) for name, text in texts.items() for line in text.splitlines() if line[:1] != "|"]
    assert [(name, line) for name, line in lines if len(line) > 140] == []


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_links_to_are_there(page):
    links = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
    paths = [link for link in links if "://" not in link]
    assert [path for path in paths if not (page.parent / path).exists()] == []


def test_own_recipe_plans_as_transformer_engine_has_it(own_recipe):
    folder, name = own_recipe
    config = compose_config([*TINY, f"precision={name}"], folder)
    check_config(config)
    facts = plan_facts(plan_of(config))["precision"]
    assert facts["name"] == name
    assert {slot: cast["block"] for slot, cast in facts["slots"].items()} == {
        "fprop.x": "1x32", "fprop.w": "32x32", "dgrad.dy": "1x32", "dgrad.w": "32x32", "wgrad.dy": "1x32",
        "wgrad.x": "1x32",
    }  # fmt: skip
    assert {(cast["format"], cast["scale"], cast["rounding"]) for cast in facts["slots"].values()} == {
        ("e4m3", "e8m0_ceil", "even")
    }
    assert facts["recipe_hash"] != compose_config([*TINY, "precision=mxfp8"]).precision.recipe_hash


def test_own_recipe_multiplies_by_one_weight_in_both_directions(own_recipe):
    """32x32 blocks by brute force: one power of two per block, the smallest that nothing clips under."""
    folder, name = own_recipe
    recipe = compose_config([*TINY, f"precision={name}"], folder).precision
    # Rows of very different size: in E4M3's normal range a power of two changes no rounding, and all blocks look equal.
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    weight = (weight * torch.exp2(-torch.arange(64.0) % 16)[:, None]).bfloat16()
    wanted = torch.empty(64, 96)
    for row in range(0, 64, 32):
        for column in range(0, 96, 32):
            block = weight[row : row + 32, column : column + 32].float()
            scale = 2.0 ** math.ceil(math.log2(block.abs().max().item() / 448))
            wanted[row : row + 32, column : column + 32] = (block / scale).to(torch.float8_e4m3fn).float() * scale
    for cast, axis in ((recipe.fprop.w, 1), (recipe.dgrad.w, 0)):
        made = inductor.operand(weight, cast, axis, "eager")
        assert made.factor is None
        assert torch.equal(made.tensor.float(), wanted)
    narrow = inductor.operand(weight, recipe.fprop.x, 1, "eager")
    assert not torch.equal(narrow.tensor.float(), wanted)


def two_steps(name, folder=None):
    """Return the names of the quantised layers, and three losses: before, between and after two AdamW steps."""
    config = compose_config([*TINY, f"precision={name}"], folder)
    model = Decoder(config.model, compute_dtype=torch.bfloat16)
    report = swap_linears(model, config.precision, config.model.num_layers, "cpu", "eager")
    initialise(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(0))
    losses = []
    for step in range(3):
        set_step_key(model, StepKey(0, step, 0))
        loss = next_token_loss_sum(model(tokens), tokens) / tokens.numel()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_delayed(model)
    return report.converted, losses


def test_own_recipe_trains(own_recipe):
    folder, name = own_recipe
    converted, ours = two_steps(name, folder)
    assert [each.rpartition(".")[2] for each in converted] == [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    assert ours[0] > ours[1] > ours[2]
    assert two_steps("bf16")[1] != ours
    assert two_steps(name, folder)[1] == ours
