"""Fixtures that tests of several packages share: a corpus, overrides of a short run, groups of ranks, a database."""

import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import lightning_llm  # noqa: F401  (before any import of Lightning: it puts off what that wants of torchmetrics)
from tests.cpu_seconds import CpuSeconds
from tests.parallel.rank_group import RankGroup
from tests.small_runs import small_words, write_corpus

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from lightning_llm.config.schema import Config

settings.register_profile("shared machine", deadline=None)  # where one example may wait longer than all others
settings.load_profile("shared machine")

SLOWEST = (
    "parallel/test_model_parallel.py", "parallel/test_equal_layouts.py", "config/test_compose.py",
    "packaging/test_readme.py", "parallel/test_optimizers.py", "parallel/test_bytes.py",
    "parallel/test_equal_pipelines.py", "docs/test_first_question.py", "train/test_precision_runs.py",
    "parallel/test_shard_operands.py", "precision/test_compiled_casts.py", "golden/test_golden.py",
)  # fmt: skip
"""Files that cost most CPU seconds, the dearest first, by the list that ends a run of the tests (cpu_seconds.py).

All tests together have 12 minutes on two cores: some 1,250 CPU seconds. A file is one worker's, and the last to begin
must be a cheap one. What keeps a new test cheap: a run of the CLI in this process (`main([...])`), seconds less than a
new interpreter, which imports for 6, or, where it has to be another process, `forked_main.py`; ranks from
`parallel/rank_group.py`; `small_run` with as few steps as the claim takes, and eager casts; one composition for many
files, since a set of files that was not composed before takes a quarter of a second; a copy of `empty_store` where
MLflow writes; and cases that cover pairs of values (`parallel/layout_matrix.py`), with the rest marked `full`.
"""
KERNELS = "LIGHTNING_LLM_KERNELS"
SLOW_FOLDERS = ("parallel", "run/launch", "sweep", "train")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script started the tests by `&`: a run would honor it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in (signal.SIGHUP, signal.SIGQUIT):  # which `nohup make test &` ignores
        signal.signal(each, signal.SIG_DFL)
    config.pluginmanager.register(CpuSeconds(config))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums over more threads have other bits
    os.environ.pop("MLFLOW_TRACKING_URI", None)  # no test writes where its user tracks
    # Compiled casts are kept for this session: each is compiled once, and none from before can hide a fault. A worker
    # has a folder of its own: of two that want a kernel at once, one would go on with eager casts.
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        os.environ[KERNELS] = tempfile.mkdtemp(prefix="lightning-llm-kernels-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{os.environ[KERNELS]}/inductor"  # C++ compiled serves all
    else:
        os.environ[KERNELS] += f"/{worker}"


def pytest_unconfigure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ[KERNELS], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long: of two workers, one would be left with them at the end."""

    def turn(item: pytest.Item) -> int:
        file = item.path.relative_to(Path(__file__).parent)
        if str(file) in SLOWEST:
            return SLOWEST.index(str(file))
        return len(SLOWEST) + (str(file.parent) not in SLOW_FOLDERS)

    items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude imported modules, half a million objects, from garbage collection: saves one CPU second of twenty.

    And let a Trainer ask but once which callbacks are installed: 7 ms each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        if registry := sys.modules.get("lightning.fabric.utilities.registry"):
            registry.entry_points = functools.cache(registry.entry_points)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Exclude the imports of tests and objects that outlive a file from garbage collection, too.

    Each run collects at its end, a tenth of a CPU second where a test has imported MLflow or transformers.
    """
    imported = len(sys.modules)
    done = yield
    if len(sys.modules) > imported or (nextitem is not None and nextitem.path != item.path):
        gc.collect()
        gc.freeze()
    return done


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawing of compare's report out, seconds each time: tests/compare/test_report.py draws."""
    from lightning_llm.compare.report import pictures

    monkeypatch.setattr(pictures.Picture, "svg", "<svg/>")
    monkeypatch.setattr(pictures.Picture, "pdf", b"%PDF")


@pytest.fixture
def drawn(small_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs draw loss.png, which `small_run` leaves out."""
    from lightning_llm.tracking.final_figures import draw_losses
    from lightning_llm.train import run_folder

    monkeypatch.setattr(run_folder, "draw_losses", draw_losses)


@pytest.fixture
def own_writer(empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have MLflow's writer be the process that a user's is, which `empty_store` replaces."""
    from lightning_llm.tracking.mlflow import tracker

    monkeypatch.setattr(tracker, "subprocess", subprocess)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory) -> Path:
    """A folder with `documents.jsonl`: 120 documents of seeded words, and room for token caches."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def small_run(corpus_folder) -> Iterator[Callable[..., list[str]]]:
    """Return overrides of a run of 6 steps in a second or two, see `small_words`, which draws no loss.png (`drawn`)."""
    from lightning_llm.train import run_folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "draw_losses", lambda *_: None)  # 0.2 CPU seconds of every run
        yield functools.partial(small_words, corpus_folder)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankGroup]]:
    """Return the group of ranks of a world size; started when first called."""
    groups: dict[int, RankGroup] = {}

    def group(world: int) -> RankGroup:
        return groups.setdefault(world, RankGroup(world))

    yield group
    for each in groups.values():
        each.close()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A database with its tables, which take seconds to create; this process's writers are forked (`own_writer`)."""
    folder = tmp_path_factory.mktemp("store")
    from mlflow import MlflowClient

    from lightning_llm.tracking.mlflow import tracker
    from tests.forked_writer import forked_writers

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        MlflowClient(f"sqlite:///{folder}/mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracker, "subprocess", forked_writers)
        yield folder / "mlflow.db"


@pytest.fixture
def store(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "MlflowClient":
    """Return a client of an empty database in `tmp_path`, which becomes the working folder."""
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")


@pytest.fixture
def config(tmp_path: Path) -> "Config":
    """Return the config of a run in `tmp_path` for which `protocol_module` substitutes the model."""
    from tests.protocol_module import make_config

    return make_config(tmp_path)
