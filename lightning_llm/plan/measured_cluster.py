"""`cluster=measured`: what was measured of machines, written as the file of a cluster. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.config.schema import ClusterConfig

MEASURED = "measured"


def write_cluster(folder: Path, values: Mapping[str, Any], how: str) -> Path:
    """Write `folder`/cluster/measured.yaml, of which `how` says whence it is; return it.

    `values` are the keys of `cluster` but its name. Links are at most as fast as the memory that they are read from.
    """
    most = values["memory_gb_per_second"]
    links = {
        key: {**values[key], "gb_per_second": min(values[key]["gb_per_second"], most)}
        for key in ("within_node", "between_nodes")
    }
    whole = ClusterConfig.model_validate({"name": MEASURED, **values, **links})
    file = folder / "cluster" / f"{MEASURED}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump(whole.model_dump(exclude_unset=True), sort_keys=False)
    file.write_text(f"# {how}\n{content}", encoding="utf-8")
    return file
