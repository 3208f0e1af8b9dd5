"""Config files, recipes and folders that hold something else: exit 2, a line per problem, nothing made. 5 seconds."""

import os
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.sources import ConfigDirSource
from tests.config.refusals import outputs, refused  # noqa: F401 - outputs is a fixture of every test

BINARY = bytes(range(128, 256)) * 3


def test_config_dirs_with_unread_files_are_refused(capsys, tmp_path):
    folder = tmp_path / "my"
    (folder / "recipe").mkdir(parents=True)
    (folder / "recipe" / "mine.yml").write_text("seed: 1\n")
    for verb in (["recipes"], ["config", "recipe=mine"], ["plan"]):
        told = refused(capsys, tmp_path, *verb, "--config-dir", folder)
        assert f"{folder / 'recipe' / 'mine.yml'} is not read. Rename it to mine.yaml." in told
    (folder / "recipe" / "mine.yml").rename(folder / "recipe" / "mine.yaml")
    told = refused(capsys, tmp_path, "config", "recipe=mine", "--config-dir", folder / "recipe")
    assert f"the folder of a group. Give its parent: --config-dir {folder}." in told
    (folder / "recipe").rename(folder / "recipes")
    told = refused(capsys, tmp_path, "config", "recipe=mine", "--config-dir", folder / "recipes")
    assert f"is not in a group's folder. Move it, e.g. to {folder / 'recipes' / 'recipe' / 'mine.yaml'}." in told


FILES = {
    "list": ("- a\n- b\n", "the file has a list, not a mapping"),
    "empty": ("", "the file is empty"),
    "comment": ("# @package _global_\n# Mine.\n", "the file is empty"),
    "scalar": ("hello\n", "the file has a single value"),
    "tab": ("trainer:\n\tmax_steps: 2\n", "line 2, column 1: while scanning for the next token: found character '\\t'"),
    "open": ("seed: [1\n", "line 2, column 1: while parsing a flow sequence"),
    "binary": (BINARY, "line 1: byte 0x80 is not UTF-8 text"),
    "latin": ("a: 1\nb: café\n".encode("latin-1"), "line 2: byte 0xe9 is not UTF-8 text"),
    "nul": ("seed: 1\x00\n", "line 1: character '\\x00' is not allowed"),
    "twice": ("seed: 1\ntrainer:\n  name: x\n  name: y\n", "line 4: the key 'name' is already on line 3"),
    "documents": ("seed: 4\n---\nseed: 5\n", "another document"),
    "keys": ("1: x\nnull: y\n", "line 1: the key is not text"),
    "circle": ("a: &a {b: *a}\n", "an anchor contains itself"),
    "bomb": (
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
        "its aliases expand to more than 1,000,000 values",
    ),
    "deep": (f"seed: {'[' * 3_000}\n", "nested too deeply"),
    "runs_code": ("seed: !!python/object/apply:os.mkdir [here]\n", "could not determine a constructor"),
    "package": ("# @package model\nseed: 1\n", "Remove `# @package model`"),
    "half_package": ("# @package\nseed: 1\n", "Write `# @package NAME`"),
    "no_list": ("defaults: 3\n", "`defaults` must be a list"),
    "number": ("defaults:\n  - 3\n", "`defaults` has `3`"),
    "launcher": ("defaults:\n  - override /hydra/launcher: submitit\n", "Use launcher=local, slurm or ray"),
    "hydra": ("hydra:\n  run:\n    dir: x\n", "hydra.run.dir: is a setting of Hydra"),
    "hydra_text": ("hydra: x\n", "`hydra` must be a mapping"),
}


COMPOSED = {
    "group": (
        "model: llama_tiny\n",
        "model=llama_tiny: must be a mapping. A preset",
    ),
    "no_override": ("defaults:\n  - precision: mxfp8\n", "write `- override /precision: mxfp8`"),
    "list": FILES["list"],
    "itself": ("defaults:\n  - itself\n", "form a cycle"),
    "no_option": ("defaults:\n  - override /precision: fp33\n", "there is no 'fp33'. Did you mean 'fp32'?"),
    "no_group": ("defaults:\n  - override /nothing: x\n", "Could not override 'nothing'"),
    "environment": ("trainer: {max_steps: '${oc.env:NOT_THERE}'}\n", "Environment variable 'NOT_THERE' not found"),
    "name": ("run: {name: 7}\n", "run.name=7: must be a valid string. Write it in quotes."),
    "typo": ("trainer: {max_stps: 7}\n", "trainer.max_stps: unknown key. Did you mean 'max_steps'?"),
}


@pytest.mark.parametrize("name", FILES)
def test_invalid_files_are_refused(name, tmp_path):
    content, said = FILES[name]
    file = tmp_path / "recipe" / f"{name}.yaml"
    file.parent.mkdir()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        ConfigDirSource("test", f"config-dir://{tmp_path}").load_config(f"recipe/{name}")
    assert said in str(error.value)
    assert all(problem.key == f"recipe={name}" and str(file) in problem.text for problem in error.value.problems)
    assert not Path("here").exists()


@pytest.mark.parametrize("name", COMPOSED)
def test_recipes_of_ones_own(name, capsys, tmp_path):
    content, said = COMPOSED[name]
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / f"{name}.yaml").write_text(content)
    assert said in refused(capsys, tmp_path, "config", "--config-dir", tmp_path, f"recipe={name}")


def test_paths_that_are_not_files_are_refused(capsys, tmp_path):
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "folder.yaml").mkdir()
    (folder / "loop.yaml").symlink_to(folder / "loop.yaml")
    (folder / "gone.yaml").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "fifo.yaml")
    (folder / "round").symlink_to(folder)  # a folder that holds itself: listed once
    source = ConfigDirSource("test", f"config-dir://{tmp_path}")
    for name, said in (
        ("folder", "is a folder"),
        ("loop", "Too many levels of symbolic links"),
        ("gone", "does not exist"),
        ("fifo", "is not a regular file"),
    ):
        with pytest.raises(ConfigError, match=f"recipe={name}: {folder / name}.yaml .*{said}"):
            source.load_config(f"recipe/{name}")
    assert "recipe=fifo" in refused(capsys, tmp_path, "config", "--config-dir", tmp_path, "recipe=fifo")
    assert main(["recipes", "--config-dir", str(tmp_path)]) == 0
    assert "round/" not in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files_are_refused(capsys, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("seed: 1\n")
    file.chmod(0)
    assert "Permission denied" in refused(capsys, tmp_path, "config", "--config", file)


@pytest.mark.parametrize("header", ["\ufeff", "# Mine.\n# @package _global_\n"])
def test_a_recipe_needs_no_header(header, tmp_path):
    (tmp_path / "recipe" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "recipe" / "deep" / "er" / "mine.yaml").write_text(
        f"{header}defaults:\n  - /recipe/quickstart\n  - override /precision: fp32\n  - _self_\nseed: 5\n", "utf-8"
    )
    config = compose_config(["recipe=deep/er/mine"], tmp_path)
    assert (config.recipe, config.precision.name, config.seed) == ("deep/er/mine", "fp32", 5)
    assert config.run.experiment == "quickstart"


def test_other_groups_are_read_in_the_same_way_and_need_no_header_either(capsys, tmp_path):
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "own.yaml").write_text("name: own\ncompute_dtype: bf16\n")
    assert compose_config(["precision=own"], tmp_path).precision.name == "own"
    (tmp_path / "precision" / "own.yaml").write_text("- name\n")
    assert "the file has a list" in refused(capsys, tmp_path, "config", "--config-dir", tmp_path, "precision=own")


def test_a_shipped_name_is_not_taken_in_silence(capsys, tmp_path):
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "mxfp8.yaml").write_text("name: mxfp8\ncompute_dtype: fp32\n")
    told = refused(capsys, tmp_path, "config", "--config-dir", tmp_path, "precision=mxfp8")
    assert f"{tmp_path / 'precision' / 'mxfp8.yaml'} has the name of a shipped file" in told
