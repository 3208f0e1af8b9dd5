"""Configs of earlier versions, with other names of keys. Under a second."""

import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash, flatten
from lightning_llm.config.from_file import load_config
from lightning_llm.config.schema.aliases import RENAMED
from lightning_llm.config.yaml_file import config_text

UNQUANTIZED = ["precision.modules.first_blocks_high_precision=1", "precision.modules.last_fraction_high_precision=0.5"]


def of_before(text: str) -> str:
    """Return a config.yaml as the first version wrote it: the last parts of renamed keys are theirs alone."""
    for before, now in RENAMED.items():
        text = text.replace(f"{now.rpartition('.')[2]}:", f"{before.rpartition('.')[2]}:")
    return text


@pytest.mark.parametrize(
    "overrides", [["precision=fp8_current"], ["precision=mxfp8", *UNQUANTIZED], ["precision=bf16"]]
)
def test_a_config_of_an_earlier_release_is_the_same_run(overrides, tmp_path, small_run):
    config = compose_config(small_run(tmp_path, *overrides))
    file = tmp_path / "config.yaml"
    file.write_text(of_before(config_text(config)))
    assert not set(RENAMED.values()) & flatten(yaml.safe_load(file.read_text())).keys()
    loaded = load_config(file, [])
    assert loaded == config
    assert config_hash(loaded) == config_hash(config)


def test_hashes_are_those_of_the_first_names(tmp_path, small_run):
    """Computed by commit 86360a9, where the keys were called first_blocks_high and last_fraction_high."""
    precision = compose_config(small_run(tmp_path, "precision=mxfp8", *UNQUANTIZED)).precision
    assert precision.recipe_hash == "3ee5549842ce"


def test_a_key_under_both_names_is_reported(tmp_path, small_run, capsys):
    tree = yaml.safe_load(config_text(compose_config(small_run(tmp_path))))
    tree["precision"]["modules"]["first_blocks_high"] = 1
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert main(["plan", "--config", str(tmp_path / "config.yaml")]) == 2
    assert "first_blocks_high_precision" in capsys.readouterr().err


def test_the_former_name_of_an_override_leads_to_the_new_one(capsys):
    assert main(["plan", "recipe=quickstart", "precision=mxfp8", "precision.modules.first_blocks_high=1"]) == 2
    assert "Did you mean 'first_blocks_high_precision'?" in capsys.readouterr().err
