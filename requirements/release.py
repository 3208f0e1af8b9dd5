"""`python requirements/release.py DIR`: a release in DIR: wheel, sdist, an SBOM (CycloneDX 1.6) and SHA256SUMS.

The SBOM lists what the wheel needs, and that in turn, without extras: the versions that this environment has, the
hashes of their files as requirements/hashes.txt has them, and licences. The same sources give the same wheel and SBOM
(SOURCE_DATE_EPOCH, by default the time of the last commit).
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib.metadata import Distribution, distribution
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HASHES = ROOT / "requirements" / "hashes.txt"
NAME = "lightning-llm"


def main(folder: Path) -> int:
    """Write the release; return 0, or 2 where the folder holds anything but an earlier one, which is removed."""
    if others := sorted(file.name for file in folder.glob("*") if not is_of_release(file)):
        print(
            f"error: {folder} holds {others[0]}, which is no file of a release. Name another folder.", file=sys.stderr
        )
        return 2
    os.environ.setdefault("SOURCE_DATE_EPOCH", _last_commit())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    for kind in ("sdist", "wheel"):
        build = f"from setuptools.build_meta import build_{kind} as build; build({str(folder.absolute())!r})"
        subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    version = distribution(NAME).version
    (folder / f"{NAME}-{version}.cdx.json").write_text(sbom(folder), encoding="utf-8")
    sums = [f"{sha256(file)}  {file.name}\n" for file in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    print("".join(sums), end="")
    return 0


def is_of_release(file: Path) -> bool:
    """Return whether `file` is one that `main` writes, of any version."""
    names = "SHA256SUMS", f"{NAME}-*.cdx.json", "lightning_llm-*.tar.gz", "lightning_llm-*.whl"
    return file.is_file() and any(fnmatch(file.name, each) for each in names)


def _last_commit() -> str:
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "0"


def sha256(file: Path) -> str:
    """Return 64 hex digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def sbom(folder: Path) -> str:
    """Return the SBOM of the release in `folder` as JSON that its schema admits.

    Raises:
        RuntimeError: it does not.
    """
    known, bom = hashes(), Bom()
    components = {name: _component(found, known) for name, found in closure(NAME).items()}
    root = components[NAME]
    root.type = ComponentType.LIBRARY
    for file in folder.glob("*.whl"):  # two archives of the same sources differ, by their files' times
        root.external_references.add(_files(file.name, [sha256(file)]))
    bom.metadata.component = root
    bom.metadata.timestamp = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    for name, component in components.items():
        if name != NAME:
            bom.components.add(component)
        bom.register_dependency(component, [components[each] for each in needs(distribution(name))])
    about = "".join(f"{each.name}=={each.version}\n" for each in components.values())
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, f"{bom.metadata.timestamp} {about}")
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    if problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise RuntimeError(f"the SBOM is none: {problem}")
    return text + "\n"


def closure(name: str) -> dict[str, Distribution]:
    """Return the distributions that `name` needs here, itself first, by canonical name."""
    found: dict[str, Distribution] = {}
    waiting = [canonicalize_name(name)]
    while waiting:
        if (name := waiting.pop(0)) not in found:
            found[name] = distribution(name)
            waiting += needs(found[name])
    return found


def needs(found: Distribution) -> list[str]:
    """Return the canonical names of what a distribution asks for on this platform, without extras."""
    asked = [Requirement(each) for each in found.requires or ()]
    wanted = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    return sorted({canonicalize_name(each.name) for each in wanted})


def hashes(file: Path = HASHES) -> dict[tuple[str, str], list[str]]:
    """Return SHA-256 digests by name and version, of the files of each pin."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, version, digests in _pins(file.read_text(encoding="utf-8")):
        found[canonicalize_name(name), version] = digests
    return found


def _pins(text: str) -> Iterator[tuple[str, str, list[str]]]:
    for block in re.split(r"\n(?=\w)", text):
        if pin := re.match(r"([\w.-]+)==(\S+)", block):
            yield pin[1], pin[2], re.findall(r"--hash=sha256:([0-9a-f]{64})", block)


def _component(found: Distribution, known: dict[tuple[str, str], list[str]]) -> Component:
    name, version = canonicalize_name(found.name), found.version
    about = found.metadata
    named = about.get("License-Expression") or about.get("License") or ""
    licences = [LicenseFactory().make_from_string(named)] if 0 < len(named) < 100 else []
    digests = known.get((name, version), [])
    references = [_files(f"https://pypi.org/project/{name}/{version}/#files", digests)] if digests else []
    return Component(
        name=name,
        version=version,
        bom_ref=f"{name}=={version}",
        purl=PackageURL("pypi", name=name, version=version),
        licenses=licences,
        external_references=references,
    )


def _files(url: str, digests: list[str]) -> ExternalReference:
    """Return where a release's files are; one of `digests` is each's."""
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in digests]
    return ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=XsUri(url), hashes=hashes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a release: wheel, sdist, SBOM and SHA256SUMS.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder to make; an earlier release in it goes")
    sys.exit(main(parser.parse_args().folder))
