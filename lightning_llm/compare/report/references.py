"""The literature that verdicts rest on, each entry once: in words, and as BibTeX."""

import re
from dataclasses import dataclass
from typing import Literal

CITATION = re.compile(r" ?\[(@[\w.-]+(?:, [^\]]+|; ?@[\w.-]+)*)\]")
"""In a text: "[@dunnett1955]", "[@clopper1934; @suissa1991]", "[@ich1998, section 3.3.2]" (as Pandoc has it)."""


@dataclass(frozen=True)
class Reference:
    """One entry. `container`: journal, series or publisher; `place`: volume and pages, as "50(272):1096-1121"."""

    key: str
    kind: Literal["article", "book", "misc"]
    authors: str
    """As BibTeX has them: "Dunnett, Charles W. and Other, Name"; in braces where they are no persons."""
    title: str
    year: str
    container: str = ""
    place: str = ""
    doi: str = ""
    eprint: str = ""

    @property
    def label(self) -> str:
        """Authors and year, short: "Dunnett 1955", "Clopper and Pearson 1934"; the title where none are known."""
        if not self.authors:
            return f"{self.title} {self.year}".strip()
        if self.authors.startswith("{"):
            return f"{self.authors.strip('{}')} {self.year}".strip()
        names = [name.partition(",")[0].strip("{}") for name in self.authors.split(" and ")]
        several = len(names) > 2 or names[-1] == "others"
        return f"{names[0]} et al. {self.year}" if several else f"{' and '.join(names)} {self.year}"

    @property
    def text(self) -> str:
        """The entry in words, as it stands in a list of references, with its number at arXiv if it has one."""
        return f"{self.entry} arXiv:{self.eprint}." if self.eprint else self.entry

    @property
    def entry(self) -> str:
        """The entry in words without any number, which a link behind it has (`number`)."""
        authors = self.authors.strip("{}")
        if not self.authors.startswith("{"):
            persons = [" ".join(reversed(name.strip("{}").split(", "))) for name in self.authors.split(" and ")]
            authors = ", ".join(persons[:-1]) + (" and " if persons[:-1] else "") + persons[-1]
        where = " ".join(filter(None, (self.container, self.place)))
        return ". ".join(filter(None, (authors, self.title, where, self.year))) + "."

    @property
    def number(self) -> str:
        """What the entry is found by: its DOI, or its number at arXiv; empty where neither is known."""
        return self.doi or (f"arXiv:{self.eprint}" if self.eprint else "")

    @property
    def url(self) -> str:
        """Where it is found; empty where that is not known."""
        if self.doi:
            return f"https://doi.org/{self.doi}"
        return f"https://arxiv.org/abs/{self.eprint}" if self.eprint else ""

    def as_bibtex(self, escaped: dict[str, str]) -> str:
        """Return the entry of a .bib file; `escaped`: letters that TeX would take for its own, and what stands for
        them.

        A number at arXiv stands where every style prints it, and nowhere else: plain styles know no `eprint`, and
        others would print it beside.
        """
        volume, _, pages = self.place.partition(":")
        volume, _, number = volume.partition("(")
        where = ", ".join(filter(None, (self.container, f"arXiv:{self.eprint}" if self.eprint else "")))
        article = {"volume": volume, "number": number.rstrip(")"), "pages": pages.replace("-", "--")}
        fields = {
            "author": self.authors,
            "title": "{" + _escape(self.title, escaped) + "}",
            "year": self.year,
            {"article": "journal", "book": "publisher", "misc": "howpublished"}[self.kind]: _escape(where, escaped),
            **(article if self.kind == "article" else {"note": _escape(self.place, escaped)}),
            "doi": self.doi,
            "key": "" if self.authors else _escape(self.title, escaped),  # what it is sorted by
        }
        lines = [f"  {key} = {{{value}}}," for key, value in fields.items() if value]
        return "\n".join([f"@{self.kind}{{{self.key},", *lines, "}"])


def _escape(text: str, escaped: dict[str, str]) -> str:
    return "".join(escaped.get(letter, letter) for letter in text)


STATISTICS = (
    Reference(
        "dunnett1955", "article", "Dunnett, Charles W.",
        "A multiple comparison procedure for comparing several treatments with a control", "1955",
        "Journal of the American Statistical Association", "50(272):1096-1121", "10.1080/01621459.1955.10501294",
    ),
    Reference(
        "genz2009", "book", "Genz, Alan and Bretz, Frank", "Computation of multivariate normal and t probabilities",
        "2009", "Springer", "Lecture Notes in Statistics 195", "10.1007/978-3-642-01689-9",
    ),
    Reference(
        "sidak1968", "article", "Sidak, Zbynek",
        "On multivariate normal probabilities of rectangles: their dependence on correlations", "1968",
        "The Annals of Mathematical Statistics", "39(5):1425-1434",
    ),
    Reference(
        "satterthwaite1946", "article", "Satterthwaite, Franklin E.",
        "An approximate distribution of estimates of variance components", "1946", "Biometrics Bulletin",
        "2(6):110-114", "10.2307/3002019",
    ),
    Reference(
        "hasler2008", "article", "Hasler, Mario and Hothorn, Ludwig A.",
        "Multiple contrast tests in the presence of heteroscedasticity", "2008", "Biometrical Journal",
        "50(5):793-800", "10.1002/bimj.200710466",
    ),
    Reference(
        "bancroft1944", "article", "Bancroft, T. A.",
        "On biases in estimation due to the use of preliminary tests of significance", "1944",
        "The Annals of Mathematical Statistics", "15(2):190-204", "10.1214/aoms/1177731284",
    ),
    Reference(
        "bancroft1983", "article", "Bancroft, T. A. and Han, Chien-Pai",
        "A note on pooling variances", "1983", "Journal of the American Statistical Association", "78(384):981-983",
    ),
    Reference(
        "ich1998", "misc", "{ICH}",
        "Harmonised tripartite guideline E9: Statistical principles for clinical trials", "1998",
    ),
    Reference(
        "clopper1934", "article", "Clopper, C. J. and Pearson, E. S.",
        "The use of confidence or fiducial limits illustrated in the case of the binomial", "1934", "Biometrika",
        "26(4):404-413", "10.1093/biomet/26.4.404",
    ),
    Reference(
        "mcnemar1947", "article", "McNemar, Quinn",
        "Note on the sampling error of the difference between correlated proportions or percentages", "1947",
        "Psychometrika", "12(2):153-157", "10.1007/BF02295996",
    ),
    Reference(
        "suissa1991", "article", "Suissa, Samy and Shuster, Jonathan J.",
        "The 2 x 2 matched-pairs trial: exact unconditional design and analysis", "1991", "Biometrics",
        "47(2):361-372", "10.2307/2532128",
    ),
    Reference(
        "ohagan2005", "article", "O'Hagan, Anthony and Stevens, John W. and Campbell, Michael J.",
        "Assurance in clinical trial design", "2005", "Pharmaceutical Statistics", "4(3):187-201", "10.1002/pst.175",
    ),
    Reference(
        "hoenig2001", "article", "Hoenig, John M. and Heisey, Dennis M.",
        "The abuse of power: the pervasive fallacy of power calculations for data analysis", "2001",
        "The American Statistician", "55(1):19-24", "10.1198/000313001300339897",
    ),
    Reference(
        "lan1983", "article", "Lan, K. K. Gordon and DeMets, David L.",
        "Discrete sequential boundaries for clinical trials", "1983", "Biometrika", "70(3):659-663",
        "10.1093/biomet/70.3.659",
    ),
    Reference(
        "jennison1989", "article", "Jennison, Christopher and Turnbull, Bruce W.",
        "Interim analyses: the repeated confidence interval approach", "1989",
        "Journal of the Royal Statistical Society B", "51(3):305-361", "10.1111/j.2517-6161.1989.tb01433.x",
    ),
    Reference(
        "hurlbert1984", "article", "Hurlbert, Stuart H.",
        "Pseudoreplication and the design of ecological field experiments", "1984", "Ecological Monographs",
        "54(2):187-211", "10.2307/1942661",
    ),
    Reference("tukey1953", "misc", "Tukey, John W.", "The problem of multiple comparisons", "1953",
              "Princeton University, mimeographed notes"),
    Reference(
        "dunnett1980", "article", "Dunnett, Charles W.", "Pairwise multiple comparisons in the unequal variance case",
        "1980", "Journal of the American Statistical Association", "75(372):796-800",
    ),
    Reference(
        "fieller1954", "article", "Fieller, E. C.", "Some problems in interval estimation", "1954",
        "Journal of the Royal Statistical Society B", "16(2):175-185", "10.1111/j.2517-6161.1954.tb00159.x",
    ),
    Reference(
        "kaplan1958", "article", "Kaplan, E. L. and Meier, Paul",
        "Nonparametric estimation from incomplete observations", "1958",
        "Journal of the American Statistical Association", "53(282):457-481", "10.1080/01621459.1958.10501452",
    ),
    Reference(
        "thompson1936", "article", "Thompson, William R.",
        "On confidence ranges for the median and other expectation distributions for populations of unknown "
        "distribution form", "1936", "The Annals of Mathematical Statistics", "7(3):122-128",
    ),
    Reference("fisher1935", "book", "Fisher, Ronald A.", "The design of experiments", "1935", "Oliver and Boyd"),
)  # fmt: skip
"""What the statistical method is taken from."""
LADDER = (
    Reference("hoffmann2022", "misc", "Hoffmann, Jordan and others",
              "Training compute-optimal large language models", "2022", eprint="2203.15556"),
    Reference("besiroglu2024", "misc", "Besiroglu, Tamay and others", "Chinchilla scaling: A replication attempt",
              "2024", eprint="2404.10102"),
    Reference("kumar2024", "misc", "Kumar, Tanishq and others", "Scaling laws for precision", "2024",
              eprint="2411.04330"),
    Reference(
        "wu1986", "article", "Wu, C. F. J.",
        "Jackknife, bootstrap and other resampling methods in regression analysis", "1986", "The Annals of Statistics",
        "14(4):1261-1295", "10.1214/aos/1176350142",
    ),
    Reference(
        "mackinnon1985", "article", "MacKinnon, James G. and White, Halbert",
        "Some heteroskedasticity-consistent covariance matrix estimators with improved finite sample properties",
        "1985", "Journal of Econometrics", "29(3):305-325", "10.1016/0304-4076(85)90158-7",
    ),
    Reference(
        "fisher1922", "article", "Fisher, Ronald A.",
        "The goodness of fit of regression formulae, and the distribution of regression coefficients", "1922",
        "Journal of the Royal Statistical Society", "85(4):597-612", "10.2307/2341124",
    ),
    Reference(
        "brown1974", "article", "Brown, Morton B. and Forsythe, Alan B.",
        "The small sample behavior of some statistics which test the equality of several means", "1974",
        "Technometrics", "16(1):129-132", "10.1080/00401706.1974.10489158",
    ),
    Reference(
        "smyth2004", "article", "Smyth, Gordon K.",
        "Linear models and empirical Bayes methods for assessing differential expression in microarray experiments",
        "2004", "Statistical Applications in Genetics and Molecular Biology", "3(1):3", "10.2202/1544-6115.1027",
    ),
)  # fmt: skip
"""What the fit over sizes and tokens is taken from."""
SOFTWARE = (
    Reference(
        "pytorch2024", "misc", "Ansel, Jason and others",
        "PyTorch 2: Faster machine learning through dynamic Python bytecode transformation and graph compilation",
        "2024", "ASPLOS", doi="10.1145/3620665.3640366",
    ),
    Reference("lightning2019", "misc", "Falcon, William and {The PyTorch Lightning team}", "PyTorch Lightning", "2019",
              doi="10.5281/zenodo.3828935"),
)  # fmt: skip
KNOWN = {reference.key: reference for reference in (*STATISTICS, *LADDER, *SOFTWARE)}


def citations_in(mark: str) -> list[tuple[str, str]]:
    """Return [(key, where in it)] of a mark "[@a, section 3; @b]"."""
    items = re.split(r"; ?@", mark.strip(" []").removeprefix("@"))
    return [(key, place) for key, _, place in (item.partition(", ") for item in items)]


def keys_in(text: str) -> list[str]:
    """Return the keys that `text` cites, in order."""
    return [key for found in CITATION.finditer(text) for key, _ in citations_in(found[0])]
