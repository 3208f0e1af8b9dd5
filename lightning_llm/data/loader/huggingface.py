"""loader=huggingface: a local folder (data files, or what `save_to_disk` wrote), or a dataset of the hub."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_llm.config.schema.data import TextSourceConfig
from lightning_llm.data.loader.records import column_of, said_in_a_line
from lightning_llm.data.source import these_files
from lightning_llm.errors import ConfigError, Problem, did_you_mean

HUB_PROBE_SECONDS = 5


class HuggingFaceReader:
    """A `DocumentReader` of rows."""

    def __init__(self, config: TextSourceConfig, key: str, files: Sequence[Path]):
        self.config, self.key, self.files = config, key, files

    def documents(self) -> Iterator[str | None]:
        """Yield each row's text."""
        is_hub = not Path(self.config.path or "").expanduser().exists()
        where = these_files(self.config.path, [] if is_hub else self.files)
        yield from column_of(load(self.key, self.config), self.config.text_key, self.key, where)


def load(key: str, config: TextSourceConfig) -> Any:
    """Return the dataset named by `config.path`, `.subset`, `.split`, `.revision`; local files are streamed.

    Raises ConfigError, with `key` (data.sources.NAME) before the key at fault, for a hub name that is unknown, refused
    or out of reach, and for a subset or split that does not exist.
    """
    import datasets

    path = config.path or ""
    local = Path(path).expanduser().absolute()
    if not local.exists():
        return _load_from_hub(key, config)
    if (local / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(local))
        if config.split not in splits:
            text = f"{local} has no split {config.split!r}.{did_you_mean(config.split, splits)}"
            raise ConfigError(Problem(f"{key}.split", text))
        return splits[config.split]
    if (local / "state.json").is_file():
        return datasets.load_from_disk(str(local))
    return _load(key, str(local), config, streaming=True)


def _load(key: str, path: str, config: TextSourceConfig, **options: Any) -> Any:
    import datasets

    try:
        with said_in_a_line():
            return datasets.load_dataset(path, name=config.subset, split=config.split, **options)
    except (ValueError, OSError) as error:  # names the splits or subsets there are
        wanted = f"subset {config.subset!r}, split {config.split!r}"
        raise ConfigError(Problem(f"{key}.path", f"{path!r} ({wanted}) cannot be loaded: {error}")) from error


def _load_from_hub(key: str, config: TextSourceConfig) -> Any:
    """Ask the hub once, briefly, before `datasets` would try again and again for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    path = config.path or ""
    try:
        HfApi().dataset_info(path, revision=config.revision, timeout=HUB_PROBE_SECONDS)
    except (HfHubHTTPError, HFValidationError) as error:
        text = (
            f"the hub does not give {path!r}: {str(error).splitlines()[0]} Check the name, or log in if it is private."
        )
        raise ConfigError(Problem(f"{key}.path", text)) from error
    except Exception as error:  # those of the http library behind huggingface_hub, which has changed between versions
        with _hub_offline():
            try:
                return _load(key, path, config, revision=config.revision)
            except ConfigError:
                text = (
                    f"{path!r} is no local path, the hub cannot be reached ({error}), and no copy of it is in the "
                    "local cache. Give an existing path, or fetch the dataset once on a machine that is online."
                )
                raise ConfigError(Problem(f"{key}.path", text)) from error
    return _load(key, path, config, revision=config.revision)


@contextmanager
def _hub_offline() -> Iterator[None]:
    """Make `datasets` take its cached copies without asking the network, as HF_HUB_OFFLINE=1 would have."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
