"""Pins, their hashes, and the results of `make release`. 20 seconds, most of them in `make test-full`."""

import json
import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / name).read_text()
    return {canonicalize_name(package): found for package, found in PIN.findall(text)}


def test_every_pin_but_torchs_has_hashes_and_nothing_else_has() -> None:
    pinned = pins("dev.txt")
    assert pinned.pop("torch")
    assert pins("hashes.txt") == pinned
    assert pins("build.txt") == {name: pinned[name] for name in ("setuptools", "wheel")}
    for file in ("hashes.txt", "build.txt", "transformer_engine.txt"):
        blocks = re.split(r"\n(?=\w)", (ROOT / "requirements" / file).read_text())
        bare = [block.split()[0] for block in blocks if PIN.match(block) and "--hash=sha256:" not in block]
        assert bare == [], file


def test_the_sets_of_pins_cover_what_development_asks_for() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pinned = pins("dev.txt")
    for each in map(Requirement, asked):
        assert each.specifier.contains(pinned[canonicalize_name(each.name)]), each


def test_a_folder_that_holds_anything_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "SHA256SUMS").touch()
    command = [sys.executable, str(ROOT / "requirements" / "release.py"), "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "holds .git, which is no file of a release" in done.stderr
    assert (tmp_path / ".git").is_dir()


@pytest.mark.full
def test_a_release_is_whole_and_says_what_it_needs(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        command = [sys.executable, str(ROOT / "requirements" / "release.py"), str(tmp_path / folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    folder, own = tmp_path / "first", version("lightning-llm")
    check = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, capture_output=True, text=True
    )
    assert check.returncode == 0, check.stdout + check.stderr
    files = {f"lightning_llm-{own}.tar.gz", f"lightning_llm-{own}-py3-none-any.whl", f"lightning-llm-{own}.cdx.json"}
    assert {each.name for each in folder.iterdir()} == {"SHA256SUMS", *files}
    bom = json.loads((folder / f"lightning-llm-{own}.cdx.json").read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    named = {each["name"]: each for each in bom["components"]}
    assert {"torch", "lightning", "numpy", "markupsafe"} <= named.keys()
    assert not {"pytest", "ruff", "ray", "lightning-llm"} & named.keys(), "what only development needs"
    for name, each in named.items():
        assert each["purl"] == f"pkg:pypi/{name}@{each['version']}".replace("+", "%2B")
        assert name.startswith(("torch", "nvidia", "triton", "cuda")) or each["externalReferences"][0]["hashes"], name
    arrows = {each["ref"]: each.get("dependsOn", []) for each in bom["dependencies"]}
    assert f"torch=={version('torch')}" in arrows[f"lightning-llm=={own}"]
    wheel = folder / f"lightning_llm-{own}-py3-none-any.whl"
    for name in (wheel.name, f"lightning-llm-{own}.cdx.json"):
        assert (folder / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path / "again"),
    ]
    subprocess.run([*command, str(folder / f"lightning_llm-{own}.tar.gz")], check=True)
    (again,) = (tmp_path / "again").glob("*.whl")
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist()), "the sdist lacks something"
