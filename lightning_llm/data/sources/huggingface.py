"""loader=huggingface: a dataset of the hub, or a local folder with data files or the output of `save_to_disk`."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path
from typing import Any, Literal

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.schema.data import LOADERS, TextSourceConfig
from lightning_llm.data.sources.files import FoundFiles, find_files, local_path
from lightning_llm.data.sources.source import raised_in_a_line, text_of, these_files

HUB_PROBE_SECONDS = 5


@LOADERS.register
class HuggingFaceSource(TextSourceConfig):
    """loader=huggingface: a dataset of the hub, or a local folder that `datasets` can load.

    A hub dataset without `revision` is identified by its name alone, so a newer version on the hub is not noticed.
    """

    loader: Literal["huggingface"] = "huggingface"

    @classmethod
    def is_local(cls, path: str) -> bool:
        return path[0] in "/.~" or os.path.isdir(path)  # a hub name (owner/name), unless such a folder is here

    def problems(self, key: str) -> Iterator[Problem]:
        if self.part is not None:
            yield Problem(f"{key}.part", f"{self.part!r} is a key of loader=python, not of {self.loader}. Remove it.")
        if not self.path:
            yield Problem(
                f"{key}.path", f"loader={self.loader} needs a path. Give a folder or a hub name (owner/name)."
            )
            return
        absolute = local_path(self.path)
        if os.path.isfile(absolute):
            yield Problem(f"{key}.path", f"{absolute} is a file. Use loader=jsonl, text or parquet for files.")
        elif not os.path.isdir(absolute) and (self.path[0] in "/.~" or self.path.count("/") > 1):
            text = f"there is no folder {absolute}, and it is not a hub name (owner/name). Give one of these."
            yield Problem(f"{key}.path", text)

    def files(self) -> list[Path]:
        return self._in_folder().read

    def skipped_files(self) -> dict[str, str]:
        return self._in_folder().skipped

    def _in_folder(self) -> FoundFiles:
        path = self.path or ""
        return find_files(path, ("",)) if path and os.path.isdir(local_path(path)) else FoundFiles()

    def build(self, key: str, files: Sequence[Path]) -> Any:
        return HuggingFaceReader(self, key, files)


class HuggingFaceReader:
    """`DocumentReader` of the rows of a dataset.

    `skipped`: {path: reason} of files of a local folder that are not read, known after the first reading.
    """

    def __init__(self, config: TextSourceConfig, key: str, files: Sequence[Path]):
        self.config, self.key, self.files = config, key, files
        self.skipped: dict[str, str] = {}

    def documents(self) -> Iterator[str | None]:
        """Yield each row's text, None if it is null.

        Raises ConfigError for a hub name that is unknown, not accessible or not reachable, and for a subset or split
        that does not exist.
        """
        local = local_path(self.config.path or "")
        if not os.path.isdir(local):
            yield from self._texts(_load_from_hub(self.key, self.config), [])
            return
        with _plain_folder(local, self.files) as (folder, originals):
            yield from self._texts(self._load_local(folder, originals), self.files)

    def _texts(self, rows: Any, files: Sequence[Path]) -> Iterator[str | None]:
        """Yield the text of each row of a dataset; reads only the text column."""
        column, where = self.config.text_key, these_files(self.config.path, files)
        with raised_in_a_line():
            if column in (rows.column_names or ()):  # a missing one is reported from the first row
                rows = rows.select_columns([column])
            for record in rows:
                yield text_of(record, column, self.key, where)

    def _load_local(self, folder: Path, originals: Mapping[str, Path]) -> Any:
        import datasets

        config, local = self.config, local_path(self.config.path or "")
        saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
        try:
            with raised_in_a_line():
                if saved:
                    return _rows_of(datasets.load_from_disk(str(folder)), config.split, self.key, local)
                builder = datasets.load_dataset_builder(str(folder), name=config.subset)
                rows = builder.as_streaming_dataset(split=config.split)
        except (ValueError, OSError) as error:  # names the splits or subsets there are
            raise _load_problem(self.key, str(local), config, str(error).replace(str(folder), str(local))) from error
        by_split = builder.config.data_files or {}
        read = {file for split, files in by_split.items() if split == config.split for file in files}
        data = {file for files in by_split.values() for file in files}
        self.skipped = {
            str(original): f"not of split {config.split!r}" if link in data else "no data file to `datasets`"
            for link, original in originals.items()
            if link not in read
        }
        return rows


@contextmanager
def _plain_folder(folder: Path, files: Sequence[Path]) -> Iterator[tuple[Path, dict[str, Path]]]:
    """Give a folder of links to the `files` of `folder`, and link -> file.

    `datasets` resolves the folder that it is given and takes its name as a pattern, "::" in a file's name as a chain
    of URLs, and its patterns match no line break. The links have names without any of these.
    """
    temporary = tempfile.gettempdir()
    plain = temporary if not has_magic(temporary) and ":" not in temporary else "/tmp"
    with tempfile.TemporaryDirectory(dir=plain, prefix="lightning-llm-") as root:
        target, originals = Path(root).resolve() / "data", {}
        target.mkdir()
        for file in files:
            link = target / str(file.relative_to(folder)).replace("::", "\ua789\ua789").replace("\n", "\u2424")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
            originals[str(link)] = file
        yield target, originals


def _rows_of(saved: Any, split: str, key: str, where: Path) -> Any:
    """Return the rows of `split` (`datasets` notation) of a data set that `save_to_disk` wrote to `where`."""
    import datasets

    if not isinstance(saved, datasets.DatasetDict):
        if split in ("train", str(saved.split)):  # train is the default of the key
            return saved
        saved = {str(saved.split or "train"): saved}
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in saved.items()})
    except (ValueError, AssertionError) as error:
        text = f"{split!r}: {where} has no such split ({error}).{did_you_mean(split, saved)}"
        raise ConfigError(Problem(f"{key}.split", text)) from error
    return datasets.concatenate_datasets([saved[each.splitname].select(range(each.from_, each.to)) for each in parts])


def _load_problem(key: str, path: str, config: TextSourceConfig, error: str) -> ConfigError:
    wanted = f"subset {config.subset!r}, split {config.split!r}"
    return ConfigError(Problem(f"{key}.path", f"{path!r} ({wanted}) cannot be loaded: {error}"))


def _load(key: str, config: TextSourceConfig) -> Any:
    import datasets

    path = config.path or ""
    try:
        with raised_in_a_line():
            return datasets.load_dataset(path, name=config.subset, split=config.split, revision=config.revision)
    except (ValueError, OSError) as error:  # names the splits or subsets there are
        raise _load_problem(key, path, config, str(error)) from error


def _load_from_hub(key: str, config: TextSourceConfig) -> Any:
    """Ask the hub once, briefly, before `datasets` would try again and again for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    path = config.path or ""
    try:
        HfApi().dataset_info(path, revision=config.revision, timeout=HUB_PROBE_SECONDS)
    except (HfHubHTTPError, HFValidationError) as error:
        text = f"the hub rejects {path!r}: {str(error).splitlines()[0]} Check the name, or log in if it is private."
        raise ConfigError(Problem(f"{key}.path", text)) from error
    except Exception as error:  # those of the http library behind huggingface_hub, which has changed between versions
        with _hub_offline():
            try:
                return _load(key, config)
            except ConfigError:
                text = (
                    f"{path!r} is not a local path, the hub cannot be reached ({error}), and the local cache has no "
                    "copy. Give an existing path, or download the dataset once on a machine that is online."
                )
                raise ConfigError(Problem(f"{key}.path", text)) from error
    return _load(key, config)


@contextmanager
def _hub_offline() -> Iterator[None]:
    """Make `datasets` use its cached copies without network access, as with HF_HUB_OFFLINE=1."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
