"""The three ways to install the package: an editable install (which runs these tests), a bare checkout, a wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("lightning_llm", "callbacks", "conf", "recipes", "pyproject.toml", "README.md")


def ask(folder: Path, *words: str, path: Path | None) -> subprocess.CompletedProcess[str]:
    """Run the command line in `folder` with `path` as the only place that holds the package."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", "import lightning_llm; print(lightning_llm.__file__)"]
    where = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert path is None or where.stdout.startswith(str(path)), where.stdout + where.stderr
    return subprocess.run(
        [sys.executable, "-m", "lightning_llm", *words], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the files that git tracks, without leftovers of builds."""
    folder = tmp_path_factory.mktemp("source")
    for part in PARTS:
        origin = ROOT / part
        if origin.is_dir():
            shutil.copytree(origin, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, folder / part)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        ".",
    ]
    subprocess.run(command, cwd=source, check=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_file(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("lightning_llm", "callbacks", "conf", "recipes"):
        prefix = "" if folder == "lightning_llm" else "lightning_llm/"
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in {".py", ".yaml"}:
                assert prefix + str(file.relative_to(ROOT)) in packed, file
    assert "lightning_llm/py.typed" in packed
    assert not [name for name in packed if name.startswith(("tests/", "conf/", "callbacks/", "recipes/"))]


@pytest.mark.parametrize("kind", ["checkout", "wheel"])
def test_it_lists_recipes_and_plans(kind, source, wheel, tmp_path):
    if kind == "wheel":
        path = tmp_path / "site"
        shutil.unpack_archive(wheel, path, "zip")
    else:
        path = source
    listed = ask(tmp_path, "recipes", path=path)
    assert "quickstart" in listed.stdout, listed.stderr
    planned = ask(tmp_path, "plan", "recipe=quickstart", f"run.root={tmp_path}", path=path)
    assert planned.returncode == 0, planned.stderr
    assert "llama_tiny" in planned.stdout


def test_an_installed_wheel_keeps_runs_in_the_home_folder(wheel, tmp_path):
    site = tmp_path / "site"
    shutil.unpack_archive(wheel, site, "zip")
    code = "from lightning_llm.config.workspace import default_outputs; print(default_outputs())"
    environment = {"PYTHONPATH": str(site), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "lightning-llm" / "outputs")
