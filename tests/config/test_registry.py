"""Kinds by name: what registers, what a config may choose, and what is said of a name that nobody registered."""

import sys
import textwrap
from typing import Annotated, Literal

import pytest
from pydantic import ValidationError

from lightning_llm.config.schema import strict
from lightning_llm.config.schema.base import Group
from lightning_llm.errors import ConfigError
from lightning_llm.registry import NameIn, Registry


class Shape(Group):
    size: int = 1


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    """A registry whose package holds one module that registers, `square`; the test adds `circle`."""
    package = tmp_path / "shapes_of_test"
    package.mkdir()
    (package / "__init__.py").write_text("SHAPES = None\n")
    (package / "square_spec.py").write_text(
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
    (package / "drawing.py").write_text("raise RuntimeError('only *_spec modules are imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    import shapes_of_test

    registry = Registry("shape", "shapes_of_test")
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
        ({"shape": "square"}, "shape", "is 'square', must be a mapping with kind: circle, square."),
        ({"shape": {"kind": "square", "sid": 1}}, "shape.sid", "unknown key. Did you mean 'side'?"),
        ({"shape": {"kind": "circle", "radius": "3"}}, "shape.radius", "is '3', must be a valid number."),
        ({"shape": {"kind": "circle"}, "name": "cirle"}, "name", "there is no shape 'cirle'. Did you mean 'circle'?"),
        (
            {"shape": {"kind": "circle"}, "shapes": {"a": {"kind": "square", "side": 1.5}}},
            "shapes.a.side",
            "is 1.5, must be a valid integer.",
        ),
        (
            {"shape": {"kind": "circle"}, "shapes": {"a": {"kind": "circle", "radus": 1.5}}},
            "shapes.a.radus",
            "unknown key. Did you mean 'radius'?",
        ),
    ],
)
def test_what_is_wrong_is_said_at_the_key_as_it_was_written(shapes, monkeypatch, values, key, text):
    monkeypatch.setattr(strict, "Config", drawing_of(shapes))
    monkeypatch.setattr(strict, "sound_part", lambda *_: None)
    reading = strict.read_config(values)
    assert [(each.key, each.text) for each in reading.problems] == [(key, text)]


def test_a_shell_is_offered_the_kinds_and_the_keys_of_all(shapes, monkeypatch):
    monkeypatch.setattr(strict, "Config", drawing_of(shapes))
    assert strict.fields_at([]) == {"shape": True, "name": False, "shapes": True}
    assert strict.fields_at(["shape"]).keys() == {"kind", "size", "radius", "side"}
    assert strict.choices_at("name") == ["circle", "square"]
    assert strict.choices_at("shape.kind") == ["circle", "square"]


def test_what_cannot_register_is_refused(shapes):
    class Nameless(Shape):
        side: int = 1

    class Twice(Shape):
        kind: Literal["circle"] = "circle"

    class Late(Shape):
        kind: Literal["late"] = "late"

    with pytest.raises(TypeError, match="Nameless needs a field kind"):
        shapes.register(Nameless)
    with pytest.raises(ValueError, match=r"shape 'circle' is .*Circle already"):
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
    from lightning_llm import registry

    install(tmp_path, "kinds_of_test", "import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.load_installed.cache_clear()
    try:
        with pytest.raises(ConfigError) as error:
            registry.load_installed()
    finally:
        registry.load_installed.cache_clear()
    text = "'mine' of kinds-of-test (kinds_of_test) fails: ModuleNotFoundError: No module named 'no_such_module'."
    assert text in str(error.value)
