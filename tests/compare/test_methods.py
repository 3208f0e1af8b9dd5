"""The methods text describes exactly the steps that were taken, with their sources."""

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from lightning_llm.compare.best_value import BestOf
from lightning_llm.compare.judge import compare_runs
from lightning_llm.compare.recorded_looks import look_at
from lightning_llm.compare.report.latex import (
    bibliography,
    cited,
    document,
    methods_latex,
    sources_latex,
    table_latex,
    verdicts_latex,
)
from lightning_llm.compare.report.methods import PASSAGES, listed, spans
from lightning_llm.compare.report.references import KNOWN, PAPERS, citation_of, keys_in, sources_of
from lightning_llm.compare.report.tables import Table
from lightning_llm.compare.report.write import page
from lightning_llm.compare.terms import Terms
from lightning_llm.tracking.reading import read_run
from tests.compare.run_folders import make_run, make_sweep


def compared(folder, best_of=None):
    return compare_runs([read_run(each) for each in sorted(folder.iterdir())], Terms(), best_of=best_of)


def cited_keys(comparison):
    return {reference.key for reference in comparison.methods.references}


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Two recipes against bf16 at three seeds, none failed."""
    gaps = {"precision=bf16": 0.0, "precision=mxfp8": 0.001, "precision=mxfp4_sr": 0.03}
    return compared(make_sweep(tmp_path_factory.mktemp("several") / "s", gaps))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One recipe against bf16 at two seeds, one of them diverged."""
    folder = tmp_path_factory.mktemp("alone") / "s"
    for seed, last in ((0, 3.0), (1, math.nan), (2, 3.001)):
        make_run(folder / f"a{seed}", "precision=bf16", f"seed={seed}", losses={5: 4.0, 10: 3.0})
        summary = {"backend": "native"}
        losses = {5: 4.0, 10: last}
        make_run(folder / f"b{seed}", "precision=mxfp8", f"seed={seed}", losses=losses, summary=summary)
    return compared(folder)


def test_every_citation_has_its_entry_and_every_entry_is_cited():
    cited = {key for passage in PASSAGES for key in keys_in(passage.text)}
    assert cited < KNOWN.keys()
    files = (Path(__file__).parents[2] / "conf" / "precision").glob("*.yaml")
    recipes = "; ".join(yaml.safe_load(file.read_text()).get("reference") or "" for file in files)
    by_recipes = {source.key for source in sources_of(recipes)}
    assert KNOWN.keys() - cited - by_recipes == {"pytorch2024", "lightning2019"}
    assert not re.search(r"\[@|@\]", "".join(passage.text for passage in PASSAGES if not keys_in(passage.text)))
    headings = [passage.heading for passage in PASSAGES]
    assert headings == sorted(headings, key=headings.index)  # those of one heading stand together


def test_several_recipes_are_held_together_and_one_is_not(several, alone):
    family = {"dunnett1955", "genz2009", "satterthwaite1946", "bancroft1944"}
    assert family <= cited_keys(several)
    assert not family & cited_keys(alone)
    assert "The interval is Student's" in " ".join(alone.methods.texts)


def test_mcnemar_is_cited_where_a_run_failed(several, alone):
    assert not {"mcnemar1947", "suissa1991"} & cited_keys(several)
    assert {"mcnemar1947", "suissa1991", "clopper1934"} <= cited_keys(alone)
    assert "none did" in " ".join(several.methods.texts)


def test_the_runs_are_described_as_they_were(several, alone):
    text = several.methods.texts[0]
    assert text.startswith(
        "Runs. mxfp8 (Transformer Engine, MXFP8BlockScaling; Mishra et al. 2025) and mxfp4_sr (Tseng et al. 2025; "
        "amazon-science/mxfp4-llm, BW_USE_MXFP4=3) were compared with bf16 (Kalamkar et al. 2019) (precision) in 3 "
        "pairs of runs each, of seeds 0 to 2: 9 runs."
    )
    for words in (
        "llama_tiny (2.16M parameters, 4 layers, 192 wide), trained on 205K tokens of the data python (256 tokens a "
        "sequence, 4 sequences a step, optimizer adamw, peak learning rate",
        "The margin is 0.01 nats per token of val_loss, the confidence 95 %, the tail the last 10 % of the steps (2 "
        "validations).",
        "mxfp8 and mxfp4_sr ran emulated",
        "lightning-llm 0.1.0 (commit 000000000000), PyTorch (Ansel et al. 2024) 2.13.0",
        "on AMD EPYC, 2 threads.",
    ):
        assert words in text
    assert "mxfp8 ran natively." in alone.methods.texts[0]


def test_a_model_is_named_with_the_keys_in_which_it_is_not_its_file(tmp_path):
    narrow = " model.num_layers=2 model.hidden_size=64 model.num_heads=2 model.layers=[gla,attention]"
    gaps = {f"precision={name} model=llama_tiny{narrow}": 0.0 for name in ("bf16", "mxfp8")}
    text = compared(make_sweep(tmp_path / "s", gaps)).methods.texts[0]
    assert "llama_tiny with num_layers=2, hidden_size=64, num_heads=2, layers=[gla, attention] (379K param" in text


def test_seeds_that_choose_and_looks_are_named_where_there_were_any(tmp_path, several):
    losses = {"1e-3": 0.1, "2e-3": 0.0, "4e-3": 0.1}  # best inside the grid
    rates = {f"precision={p} optim.learning_rate={r}": gap for p in ("bf16", "mxfp8") for r, gap in losses.items()}
    chosen = compared(make_sweep(tmp_path / "s", rates), BestOf("optim.learning_rate"))
    text = " ".join(chosen.methods.texts)
    assert "optim.learning_rate was chosen for each recipe at seed 0." in text
    assert "chosen by the losses of seeds that were not judged" in text
    assert "chosen" not in " ".join(several.methods.texts)
    assert "looked at" not in text
    chosen.looks = [look_at(chosen.verdicts, chosen.terms)] * 2
    assert "The runs were looked at 2 times." in " ".join(chosen.methods.texts)


def test_citations_become_latex_and_bibtex(several):
    assert cited("so [@ich1998, section 3.3.2], at 5 % [@clopper1934; @suissa1991]_") == (
        r"so~\cite[section 3.3.2]{ich1998}, at 5~\%~\cite{clopper1934,suissa1991}\_"
    )
    entries = bibliography(several.methods.references)
    named = set(re.findall(r"@\w+\{([^,]+),", entries))
    used = {key for keys in re.findall(r"\\cite(?:\[[^]]*\])?\{([^}]*)\}", methods_latex(several.methods))
            for key in keys.split(",")}  # fmt: skip
    assert used == named
    for entry in entries.split("\n\n"):
        assert entry.count("{") == entry.count("}")
    assert r"\cite[MXFP8BlockScaling]{transformer-engine}, \cite{mishra2025}" in methods_latex(several.methods)
    assert "pages = {1096--1121}" in entries


def test_each_source_is_cited_once_with_its_number_once(several):
    """Of two recipes by one paper, and in the forms of the list: .bib, words (compare.json), page."""
    words = "Tseng, Yu and Park, arXiv 2502.20586 (ablation); amazon-science/mxfp4-llm, BW_USE_MXFP4=2"
    both = sources_of(words) | sources_of("A. N. Other, arXiv:2501.00001v2, section 2; Transformer Engine X [a]")
    assert [(source.label, place) for source, place in both.items()] == [
        ("Tseng et al. 2025", "ablation"),
        ("amazon-science/mxfp4-llm", "BW_USE_MXFP4=2"),
        ("A. N. Other 2025", "section 2"),
        ("Transformer Engine", "X (a)"),
    ]
    references = tuple(dict.fromkeys([*several.methods.references, *both, *KNOWN.values()]))
    assert len({reference.key for reference in references}) == len(references)
    assert [reference.text for reference in references].count(next(iter(both)).text) == 1
    numbers = [reference.eprint for reference in references if reference.eprint]
    assert len(numbers) == len(set(numbers)) >= 7
    written = page(several, [], {}).partition('class="references"')[2].partition("</ol>")[0]
    shown = re.sub(r"<[^>]*>", "", written)
    for reference in references:
        if not reference.eprint:
            continue
        _, entry = bibliography([reference]).split("\n", 1)
        assert (entry.count(reference.eprint), entry.count("arXiv")) == (1, 1)
        assert reference.text.count("arXiv") == 1
        assert shown.count(reference.eprint) == (reference in several.methods.references)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Kumar et al., arXiv 2411.04330", [("kumar2024", "")]),
        ("https://arxiv.org/abs/2502.20586", [("tseng2025", "")]),
        ("Tseng (https://arxiv.org/pdf/2502.20586v2.pdf), section 3", [("tseng2025", "section 3")]),
        ("Tseng, arXiv:2502.20586 (https://arxiv.org/abs/2502.20586)", [("tseng2025", "")]),
        ("arXiv 2502.20586 and arXiv 2411.04330, section 2", [("tseng2025", ""), ("kumar2024", "section 2")]),
        ("Tseng, arXiv 2502.20586, section 4.1, and Doe, arXiv 2401.00001", [("tseng2025", "section 4.1"),
                                                                              ("arxiv-2401.00001", "")]),
        ("Tseng, arXiv 2502.20586 (ablation), Doe, arXiv 2401.00001 (b)", [("tseng2025", "ablation"),
                                                                            ("arxiv-2401.00001", "b")]),
    ],
)  # fmt: skip
def test_numbers_at_arxiv_are_found_in_every_form_and_each_once(words, expected):
    found = sources_of(words)
    assert [(source.key, place) for source, place in found.items()] == expected
    assert {source.title for source in found if source.key.startswith("arxiv-")} <= {"Doe"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Doe, J., My paper, 2024", ("Doe, J., My paper", "2024", "")),
        ("Doe, J. and Roe, R., My paper (2023), section 3", ("Doe, J. and Roe, R., My paper", "2023", "section 3")),
        ("OCP Microscaling Formats v1.0, section 6.3", ("OCP Microscaling Formats v1.0", "", "section 6.3")),
        ("amazon-science/mxfp4-llm, te1.5/linear.py", ("amazon-science/mxfp4-llm", "", "te1.5/linear.py")),
    ],
)
def test_a_source_without_a_number_keeps_its_whole_title(words, expected):
    ((source, place),) = sources_of(words).items()
    assert (source.title, source.year, place) == expected


def test_every_shipped_recipe_names_sources_that_are_known(several):
    for file in (Path(__file__).parents[2] / "conf" / "precision").glob("*.yaml"):
        words = yaml.safe_load(file.read_text()).get("reference") or ""
        for source in sources_of(words):
            assert source.eprint in ("", *PAPERS), f"{file.name}: {source.text}"
        keys = keys_in(f"so {citation_of(sources_of(words))}.") if words else []
        assert keys == [source.key for source in sources_of(words)]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no TeX here")
def test_tex_sets_it(several, tmp_path):
    (tmp_path / "verdicts.tex").write_text(verdicts_latex(several))
    (tmp_path / "sources.tex").write_text(sources_latex(several))
    (tmp_path / "methods.tex").write_text(methods_latex(several.methods))
    (tmp_path / "references.bib").write_text(bibliography(several.methods.references))
    words = ("a_recipe_with_a_long_name_of_its_own", "another_recipe_with_a_long_name", *6 * ["+0.0012 [-0.01, 0.01]"])
    wide = Table("wide", "Wide", "As wide as the page.", words, (words,), ({},), names=2)
    (tmp_path / "wide.tex").write_text(table_latex(wide))
    (tmp_path / "report.tex").write_text(document("precision against bf16 & co", [], [wide]))
    for command in (["pdflatex", "-interaction=nonstopmode", "report"], ["bibtex", "report"]) * 2:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
    assert "Warning" not in done.stdout
    overfull = re.findall(r"Overfull .hbox \((\d+)", (tmp_path / "report.log").read_text())
    assert not [points for points in overfull if int(points) > 10]


def test_words_for_lists_and_spans():
    assert [listed(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]
    assert [spans(seeds) for seeds in ([0], [0, 1], [0, 1, 2, 5], [3, 7])] == ["0", "0, 1", "0 to 2, 5", "3, 7"]


def test_a_recipe_that_keeps_no_block_says_so_in_its_name_and_in_the_methods(tmp_path):
    gaps = {f"precision={name} model.num_layers=3": 0.0 for name in ("bf16", "nvfp4", "nvfp4_all_blocks")}
    comparison = compared(make_sweep(tmp_path / "s", gaps, seeds=2))
    shortfall = "0 of 3 blocks kept in bf16; its source keeps the first 3.2 % and the last 12.9 %"
    counts = "21 of 22 linear layers quantized, in 3 of 3 blocks"
    by_name = {each["name"]: each for each in comparison.as_data()["verdicts"]}
    assert by_name["nvfp4"]["line"].startswith(f"nvfp4 ({shortfall}) at ")
    assert by_name["nvfp4"]["quantized"] == {
        "linears": 21, "all_linears": 22, "blocks": 3, "all_blocks": 3, "shortfall": shortfall,
    }  # fmt: skip
    assert by_name["nvfp4_all_blocks"]["line"].startswith("nvfp4_all_blocks at ")
    for texts in (comparison.methods.texts, comparison.notes):
        found = " ".join(texts)
        assert f"nvfp4: {counts}; {shortfall}." in found
        assert f"nvfp4_all_blocks: {counts}." in found
        assert "bf16:" not in found
