"""The shipped recipes, as the tests load them."""

from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

from lightning_llm.config.schema.precision import PrecisionConfig, slots_of

FOLDER = Path(__file__).parents[2] / "conf" / "precision"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def load(name):
    return PrecisionConfig.model_validate(OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"), resolve=True))


CASTS = {f"{name}:{slot}": cast for name in RECIPES for slot, cast in slots_of(load(name)).items() if cast.quantises}
DISTINCT = {cast: label for label, cast in CASTS.items()}
"""Every cast that quantises by "recipe:slot", and each of them once, with the last of its names."""
