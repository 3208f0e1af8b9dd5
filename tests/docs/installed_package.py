"""Packages of documents and of tests/examples, laid where Python finds them, as pip does."""

import re
import tomllib
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = Path(__file__).parents[1] / "examples"


def lay_package(document: str, folder: Path) -> set[str]:
    """Write the files of a document's package under `folder`, with its entry points; return their names.

    A file is a code block with its name as a comment in the first line.
    """
    found = re.findall(r"^```\w+\n# (\S+\.\w+)\n(.*?)^```", (DOCS / document).read_text(), re.DOTALL | re.MULTILINE)
    return lay_files(dict(found), folder)


def lay_examples(folder: Path) -> set[str]:
    """Write the package tests/examples under `folder`, with its entry points; return the names of its modules."""
    project = (EXAMPLES / "pyproject.toml").read_text()
    modules = tomllib.loads(project)["tool"]["setuptools"]["py-modules"]
    files = {f"{module}.py": (EXAMPLES / f"{module}.py").read_text() for module in modules}
    lay_files(files | {"pyproject.toml": project}, folder)
    return set(modules)


def lay_files(files: dict[str, str], folder: Path) -> set[str]:
    """Write a package's files under `folder` (name -> text, with a pyproject.toml), and its entry points."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))
    return set(files)
