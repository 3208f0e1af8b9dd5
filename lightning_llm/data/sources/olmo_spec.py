"""The loader of OLMo's token files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TokenSourceConfig
from lightning_llm.data.sources.files import LocalFiles, file_problems

NUMPY_MAGIC = b"\x93NUMPY"


@LOADERS.register
class OlmoSource(LocalFiles, TokenSourceConfig):
    """`.npy` as OLMo reads it: token ids alone, without a header, each document closed by the end-of-document token."""

    suffixes: ClassVar[tuple[str, ...]] = (".npy",)

    loader: Literal["olmo"] = "olmo"
    dtype: Literal["uint16", "uint32"] = Field("uint16", description="one token in the file, little-endian")

    def problems(self, key: str) -> Iterator[Problem]:
        yield from file_problems(key, self)
        size = int(self.dtype[-2:]) // 8
        for file in self.files():
            stored = file.stat().st_size
            with file.open("rb") as opened:
                head = opened.read(len(NUMPY_MAGIC))
            if head == NUMPY_MAGIC:
                text = f"{file} has numpy's header, and OLMo's files have none: write it anew with numpy's tofile."
                yield Problem(f"{key}.path", text)
            elif stored % size or not stored:
                text = f"{file} has {stored:,} bytes, which are no whole number of {self.dtype}: it is cut short."
                yield Problem(f"{key}.path", text if stored else f"{file} is empty.")

    def build(self, key: str, files: Sequence[Path]) -> Any:
        from lightning_llm.data.sources.olmo import OlmoReader

        return OlmoReader(list(files), self.dtype)
