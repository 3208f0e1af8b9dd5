"""Record the golden curves of all precision recipes, or of those named: `make golden ARGS="mxfp8 nvfp4"`."""

import sys
import tempfile
from pathlib import Path

from trajectory import HERE, RECIPES, first_difference, header, recorded, trajectory


def main(recipes: list[str]) -> None:
    for recipe in recipes or RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            curve = trajectory(recipe, Path(folder, "cache"))
        file = HERE / f"{recipe}.txt"
        changed = first_difference(recorded(recipe)[1], curve) if file.exists() else "new"
        file.write_text(header(recipe) + curve, encoding="utf-8")
        print(f"{recipe}: {'unchanged' if changed is None else changed}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
