"""Record the golden curves of all precision recipes, or of those named: `make golden ARGS="mxfp8 nvfp4"`."""

import argparse
import tempfile
from pathlib import Path

from tests.golden.trajectory import (
    RECIPES,
    distances,
    families,
    file_of,
    first_difference,
    header,
    kernels,
    recorded,
    trajectory,
)


def main(recipes: list[str]) -> None:
    here = kernels()["kernels"]
    others = [family for family in families() if family != here]
    for recipe in recipes or RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            curve = trajectory(recipe, Path(folder, "cache"))
        file = file_of(recipe, here)
        changed = first_difference(recorded(recipe, here)[1], curve) if file.exists() else "new"
        file.parent.mkdir(exist_ok=True)
        file.write_text(header(recipe) + curve, encoding="utf-8")
        print(f"{recipe}: {'unchanged' if changed is None else changed}", flush=True)
        for family in others:  # which are recorded on their own machines
            if not file_of(recipe, family).exists():
                continue
            furthest = max(distances(recorded(recipe, family)[1], curve))
            print(f"{recipe}: at most {furthest:.1e} of a number off {family}'s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="precision recipes (all of them)")
    main(parser.parse_args().recipes)
