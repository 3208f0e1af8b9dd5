"""Kinds by name: registration, choice in a config, and the message about an unknown name."""

import os
import subprocess
import sys
import textwrap
from typing import Annotated, Literal

import pytest
from pydantic import ValidationError

from lightning_llm.base.errors import ConfigError
from lightning_llm.base.registry import NameIn, Registry
from lightning_llm.config.schema import declared_types
from lightning_llm.config.schema import validation as strict
from lightning_llm.config.schema.base import Group
from lightning_llm.config.schema.cast_kinds import ROUNDINGS


class Shape(Group):
    size: int = 1


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    """A registry with one built-in kind, `square`; the test adds `circle`."""
    package = tmp_path / "shapes_of_test"
    package.mkdir()
    (package / "__init__.py").write_text("SHAPES = None\n")
    (package / "kinds.py").write_text(
        textwrap.dedent("""
        from typing import Literal
        import shapes_of_test
        from lightning_llm.config.schema.base import Group

        @shapes_of_test.SHAPES.register
        class Square(Group):
            kind: Literal["square"] = "square"
            side: int = 2
        """)
    )
    (package / "drawing.py").write_text("raise RuntimeError('only the named modules are imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    import shapes_of_test

    registry = Registry("shape", "shapes_of_test.kinds")
    shapes_of_test.SHAPES = registry

    @registry.register
    class Circle(Shape):
        kind: Literal["circle"] = "circle"
        radius: float = 1.0

    yield registry
    for name in [name for name in sys.modules if name.startswith("shapes_of_test")]:
        del sys.modules[name]


def drawing_of(registry):
    class Drawing(Group):
        shape: Annotated[Shape, registry]
        name: Annotated[str, NameIn(registry)] = "circle"
        shapes: dict[str, Annotated[Shape, registry] | None] = {}

    return Drawing


def test_a_package_registers_its_kinds_and_a_config_chooses_by_name(shapes):
    assert list(shapes) == ["circle", "square"]
    assert len(shapes) == 2
    assert "line" not in shapes
    read = drawing_of(shapes).model_validate({"shape": {"kind": "square", "side": 5}, "name": "square"})
    assert type(read.shape) is shapes["square"]
    assert read.shape.side == 5
    assert read.model_dump() == {"shape": {"kind": "square", "side": 5}, "name": "square", "shapes": {}}
    assert drawing_of(shapes)(shape=shapes["circle"](radius=2.0)).shape.radius == 2.0


@pytest.mark.parametrize(
    ("values", "key", "text"),
    [
        ({"shape": {"kind": "squre"}}, "shape.kind", "there is no shape 'squre'. Did you mean 'square'?"),
        ({"shape": {"side": 1}}, "shape.kind", "a value must be given. Known here: circle, square."),
        ({"shape": "square"}, "shape", "must be a mapping with kind: circle, square."),
        ({"shape": {"kind": "square", "sid": 1}}, "shape.sid", "unknown key. Did you mean 'side'?"),
        ({"shape": {"kind": "circle", "radius": "3"}}, "shape.radius", "must be a valid number."),
        ({"shape": {"kind": "circle"}, "name": "cirle"}, "name", "there is no shape 'cirle'. Did you mean 'circle'?"),
        (
            {"shape": {"kind": "circle"}, "shapes": {"a": {"kind": "square", "side": 1.5}}},
            "shapes.a.side",
            "must be a valid integer.",
        ),
        (
            {"shape": {"kind": "circle"}, "shapes": {"a": {"kind": "circle", "radus": 1.5}}},
            "shapes.a.radus",
            "unknown key. Did you mean 'radius'?",
        ),
    ],
)
def test_problems_are_reported_at_the_key_as_written(shapes, monkeypatch, values, key, text):
    for module in (strict, declared_types):
        monkeypatch.setattr(module, "Config", drawing_of(shapes))
    monkeypatch.setattr(strict, "sound_part", lambda *_: None)
    reading = strict.read_config(values)
    assert [(each.key, each.text) for each in reading.problems] == [(key, text)]


def test_a_shell_is_offered_the_kinds_and_the_keys_of_all(shapes, monkeypatch):
    monkeypatch.setattr(declared_types, "Config", drawing_of(shapes))
    assert declared_types.fields_at([]) == {"shape": True, "name": False, "shapes": True}
    assert declared_types.fields_at(["shape"]).keys() == {"kind", "size", "radius", "side"}
    assert declared_types.choices_at("name") == ["circle", "square"]
    assert declared_types.choices_at("shape.kind") == ["circle", "square"]


def test_a_kind_can_be_given_by_name_only_if_all_keys_have_defaults(shapes):
    @shapes.register
    class Line(Shape):
        kind: Literal["line"] = "line"
        length: int

    with pytest.raises(ValidationError, match="shape 'line' cannot be given by name alone: no default for length"):
        drawing_of(shapes).model_validate({"shape": {"kind": "square"}, "name": "line"})


def test_invalid_registrations_are_rejected(shapes):
    class Nameless(Shape):
        side: int = 1

    class Twice(Shape):
        kind: Literal["circle"] = "circle"

    class Late(Shape):
        kind: Literal["late"] = "late"

    with pytest.raises(TypeError, match="Nameless needs a field kind"):
        shapes.register(Nameless)
    with pytest.raises(ValueError, match=r"shape 'circle' is already .*Circle"):
        shapes.register(Twice)
    with pytest.raises(ValidationError):
        drawing_of(shapes).model_validate({})
    with pytest.raises(RuntimeError, match="after the first config was read"):
        shapes.register(Late)


def install(folder, entry: str, source: str) -> None:
    """Lay a package `kinds_of_test` under `folder` as pip installs one, with an entry point."""
    (folder / "kinds_of_test.py").write_text(textwrap.dedent(source))
    info = folder / "kinds_of_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kinds-of-test\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[lightning_llm.components]\nmine = {entry}\n")


def test_an_installed_package_that_fails_is_named(tmp_path, monkeypatch):
    from lightning_llm.base import registry

    install(tmp_path, "kinds_of_test", "import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.load_installed.cache_clear()
    try:
        with pytest.raises(ConfigError) as error:
            registry.load_installed()
    finally:
        registry.load_installed.cache_clear()
    text = "'mine' of kinds-of-test (kinds_of_test) failed: ModuleNotFoundError: No module named 'no_such_module'."
    assert text in str(error.value)


MEAN = """
    from typing import Literal
    from pydantic import Field
    from lightning_llm.model.spec import LinearSpec, Mixer, hidden
    from lightning_llm.config.schema.model import MIXERS

    @MIXERS.register
    class Mean(Mixer):
        kind: Literal["mean_of_test"] = "mean_of_test"
        scale: float = 1.0

        def linears(self, model):
            return [LinearSpec("o_proj", "column", hidden(model), hidden(model), False)]

        def build(self, model):
            import torch
            from lightning_llm.model.linear import Linear

            class Module(torch.nn.Module):
                def __init__(self, spec):
                    super().__init__()
                    self.scale = spec.scale
                    self.o_proj = Linear(model.hidden_size, model.hidden_size, bias=False)

                def forward(self, x, rope, mask):
                    steps = torch.arange(1, x.shape[1] + 1)[:, None]
                    return self.o_proj(self.scale * x.cumsum(1) / steps)

            return Module(self)
"""
CHOOSE = """
    import sys
    from lightning_llm.config.compose import compose_config
    from lightning_llm.model.structure import linear_names
    from lightning_llm.plan.degrees import Degrees
    from lightning_llm.plan.divisibility import sharding_problems
    from lightning_llm.plan.report import plan_facts
    from lightning_llm.plan.resolve import plan_of

    block = "model.blocks={mean: {mixer: {kind: mean_of_test, scale: 0.5}}}"
    config = compose_config(["model=llama_tiny", block, "model.layers=[mean, mean_of_test]", "trainer.accelerator=cpu"])
    assert "layers.1.attention.o_proj" in linear_names(config.model)
    assert plan_facts(plan_of(config))["flops_per_token"] > 0
    problems = sharding_problems(config, Degrees(cp=2))
    assert any("the mixer of 'mean' in model.layers needs whole sequences" in problem.text for problem in problems)
    assert "torch" not in sys.modules
    print("as planned")
"""
BUILD = """
    import torch
    from lightning_llm.model.decoder import Decoder
    from lightning_llm.model.init import initialise
    model = Decoder(config.model)
    initialise(model, 0)
    assert [block.attention.scale for block in model.layers.values()] == [0.5, 1.0, 0.5, 1.0]
    assert model(torch.arange(8)[None]).isfinite().all()
"""


@pytest.mark.parametrize("code", [CHOOSE, pytest.param(CHOOSE + BUILD, marks=pytest.mark.full)], ids=["plan", "build"])
def test_a_kind_of_an_installed_package_is_chosen_by_name(tmp_path, code):
    install(tmp_path, "kinds_of_test", MEAN)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("as planned\n", 0), done.stderr


def test_all_instances_exist_before_a_compiler_traces_one():
    """`scale: eden` rounds its scales by a rounding that no slot of the recipe names."""
    ROUNDINGS._instances.clear()
    assert ROUNDINGS.instance("even") is ROUNDINGS.instance("even")
    assert set(ROUNDINGS._instances) == set(ROUNDINGS)
