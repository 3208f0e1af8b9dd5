"""The report is self-contained, readable on a phone and without seeing colors, and describes the methods."""

import base64
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from lightning_llm.__main__ import main
from lightning_llm.compare.report import pictures, write
from lightning_llm.compare.report.picture import COLOURS, DARK_COLOURS, LINES, MARKERS, SYMBOLS
from tests.compare.run_folders import verdicts

pytestmark = pytest.mark.usefixtures("undrawn")

LOADS = {"img": ("src", "srcset"), "source": ("src", "srcset"), "script": ("src",), "link": ("href",),
         "iframe": ("src",), "object": ("data",), "embed": ("src",), "video": ("src",), "audio": ("src",),
         "use": ("href",), "image": ("href", "xlink:href"), "input": ("src",)}  # fmt: skip
VOID = {"meta", "img", "source", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """A page's elements, [(tag, attributes, tags around it)], the resources that a browser would load, and the text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.loaded, self.around, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.around == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, attributes, [each for each, _ in self.around], [a for _, a in self.around]))
        self.loaded += [attributes[name] for name in LOADS.get(tag, ()) if name in attributes]
        self.loaded += re.findall(r"url\((.*?)\)", attributes.get("style") or "")
        if tag not in VOID:
            self.around.append((tag, attributes))

    def handle_endtag(self, tag):
        assert self.around.pop()[0] == tag

    def handle_data(self, data):
        if self.around and self.around[-1][0] == "style":
            self.loaded += re.findall(r"url\((.*?)\)|@import ([^;]*)", data)
        else:
            self.words.append(data)

    def all(self, tag):
        return [attributes for each, attributes, *_ in self.elements if each == tag]


@pytest.fixture(scope="module")
def report(sweep):
    """(folder of the drawn report, its page, the slow libraries that were imported)"""
    code = (
        "import sys; from lightning_llm.__main__ import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'mlflow', 'lightning', 'hydra', 'scipy.stats', 'pandas'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", str(sweep)], capture_output=True, text=True, check=True
    )
    page = Page((sweep / "compare" / "report.html").read_text())
    return sweep / "compare", page, done.stdout.splitlines()[-1]


def test_nothing_is_loaded_from_elsewhere(report):
    _, page, _ = report
    assert len(page.all("img")) == 6  # gaps, three curves, loss, speed
    assert len(page.loaded) == 7  # and the narrow one of the gaps
    assert all(each.startswith("data:image/svg+xml;base64,") for each in page.loaded)
    for each in page.loaded:
        svg = base64.b64decode(each.partition(",")[2]).decode()
        assert not re.findall(r'href="(?!#)[^"]*"|url\((?!#)[^)]*\)', svg)
    assert not page.all("script")
    assert {urls["href"].partition("/")[0] for urls in page.all("a")} <= {"https:", *(f"#ref-{n}" for n in refs(page))}


def refs(page):
    return [each["id"].removeprefix("ref-") for each in page.all("li") if "id" in each]


def test_the_report_fits_a_phone(report):
    """Pictures shrink to the width there is, tables become lists or scroll by themselves, long words break."""
    folder, page, _ = report
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    for tag, attributes, _, around in page.elements:
        if tag == "table":
            assert around[-1].get("class") == "wide"
            assert around[-1].get("tabindex") == "0"  # which a keyboard can scroll
        if tag in ("td", "img", "figure", "div", "table"):
            assert "width" not in attributes
            assert "style" not in attributes
    style = re.search(r"<style>(.*?)</style>", (folder / "report.html").read_text(), re.DOTALL)[1]
    assert re.search(r"\.wide \{[^}]*overflow-x: auto", style)
    assert re.search(r"\.plate img \{[^}]*width: 100%", style)
    assert re.search(r"body \{[^}]*overflow-wrap: anywhere", style)
    assert "@media (max-width: 40rem)" in style
    assert "min-width" not in style.replace("@media (min-width", "")
    widest = max(len(row) for row in re.findall(r"<tr>.*?</tr>", (folder / "report.html").read_text(), re.DOTALL))
    assert widest < 2000


def test_pictures_have_alternative_text_and_need_no_color(report):
    folder, page, _ = report
    found = {row["name"]: row for row in json.loads((folder / "compare.json").read_text())["verdicts"]}
    gaps, *others = [image["alt"] for image in page.all("img")]
    for name, row in found.items():
        assert f"{name}: {row['gap']:+.4f} [{row['ci'][0]:+.4f}, {row['ci'][1]:+.4f}], {row['qualified']}." in gaps
    assert all(len(alt) > 60 for alt in others)
    words = " ".join(page.words)
    assert all(f"{SYMBOLS[row['verdict']]} {row['verdict']}" in words for row in found.values())
    assert len({*SYMBOLS.values()}) == len({*MARKERS.values()}) == 3
    assert len({(line.marker, line.dashes) for line in LINES}) == len(LINES)
    assert [attributes["lang"] for attributes in page.all("html")] == ["en"]
    assert all("scope" in each for each in page.all("th"))
    levels = [int(tag[1]) for tag, *_ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def linear(colour):
    """Return sRGB as linear light, [3]."""
    values = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def luminance(colour):
    return linear(colour) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize(("colours", "page"), [(COLOURS, "#ffffff"), (DARK_COLOURS, "#17191c")])
def test_colours_of_verdicts_have_contrast_and_differ_for_the_colour_blind(colours, page):
    """WCAG 2.2's contrast of text; Machado, Oliveira and Fernandes (2009), severity 1, and distance in CIELAB."""
    blind = {
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    }
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    ) / np.array([[0.95047], [1.0], [1.08883]])

    def lab(light):
        x, y, z = np.cbrt(to_xyz @ np.clip(light, 0, 1) + 1e-9)
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    for colour in colours.values():
        bright, dark = sorted((luminance(colour), luminance(page)), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5
    for matrix in blind.values():
        seen = [lab(np.array(matrix) @ linear(colour)) for colour in colours.values()]
        assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 20


def test_the_report_has_the_numbers_of_the_verdicts(report):
    folder, page, _ = report
    found = json.loads((folder / "compare.json").read_text())
    words = " ".join(page.words)
    assert "3 verdicts: 1 lossless, 1 lossy, 1 inconclusive." in words
    html = (folder / "report.html").read_text()
    for row in found["verdicts"]:
        assert f'data-label="SD of a pair, as judged">{row["sd"]:.4f}</td>' in html
        assert f'data-label="gap">{row["gap"]:+.4f}</td>'.replace("-0", "−0") in html
        assert f'data-label="code">{row["gap_by_source"]["code"]:+.4f} ['.replace(">-0", ">−0") in html
        assert row["line"] in words
    assert f'data-label="loss">{found["baselines"][0]["loss"]:.4f}</td>' in html
    assert all(heading in words for heading in ("Runs.", "Intervals.", "Failures."))
    assert all(text in "".join(page.words) for text in found["references"].values())
    assert (folder / "figure-gaps.pdf").read_bytes().startswith(b"%PDF-1.4")


def test_a_failed_part_of_the_report_is_noted_and_the_rest_written(sweep, capsys, monkeypatch, tmp_path):
    def broken(*_):
        raise RuntimeError("no ink")

    monkeypatch.setattr(pictures.Picture, "svg", "<svg/>")
    monkeypatch.setattr(pictures.Picture, "pdf", property(broken))
    monkeypatch.setattr(write, "document", broken)
    (tmp_path / "report.pdf").touch()  # of an earlier release
    assert main(["compare", str(sweep), "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "note   report.tex could not be made (RuntimeError: no ink); the rest was written." in out
    assert f"report {tmp_path / 'report.html'}" in out
    assert {file.suffix for file in tmp_path.iterdir()} == {".html", ".svg", ".csv", ".tex", ".bib", ".json"}
    monkeypatch.setattr(write, "page", broken)
    assert main(["compare", str(sweep), "--output", str(tmp_path)]) == 0
    assert "mxfp4_sr at 2.16M parameters" in capsys.readouterr().out
    assert not (tmp_path / "report.html").exists()  # the one there was is of another look


def test_every_key_of_a_verdict_is_in_the_document(sweep, capsys):
    text = (Path(__file__).parents[2] / "docs" / "reference" / "compare.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", text.split("## `compare.json`")[1]))
    assert set(verdicts(capsys, sweep)["verdicts"][0]) - {"confidence"} <= named


def test_neither_torch_nor_mlflow_is_imported(report):
    assert report[2] == "[]"
