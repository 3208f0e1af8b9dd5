"""Cached kernels: used for equal calls only."""

import os

import pytest
import torch
from filelock import FileLock

from lightning_llm.__main__ import main
from lightning_llm.precision.cast import inductor, kernel_cache, quantize
from lightning_llm.precision.cast.kernel_cache import Kernels, signature, tally
from lightning_llm.precision.cast.random_bits import Origin
from lightning_llm.precision.cast.scales import block_shape, blocked
from tests.precision.recipes import RECIPES, load

compiles = pytest.mark.skipif(inductor.no_compiler("cpu") is not None, reason="no C++ compiler")


class Counted:
    """`function` compiled, and how often it was compiled ahead."""

    def __init__(self, function):
        self.compiled, self.times = inductor._compile(function), 0

    def aot_compile(self, example):
        self.times += 1
        return self.compiled.aot_compile(example)


def even_or_odd(x):
    return x * 2.5 if x.shape[1] % 2 == 0 else x - 1.0


def kernels_of(function, identity="test"):
    return Kernels(identity, function, Counted(function))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A folder of kernels for one test. Inductor's own stays the session's."""
    assert kernel_cache.folder() is not None
    monkeypatch.setenv(kernel_cache.FOLDER, str(tmp_path / "kernels"))
    kernel_cache.folder.cache_clear()
    tally.take()
    yield tmp_path / "kernels"
    kernel_cache.folder.cache_clear()


def run(kernels, x):
    return kernels.of((x,))(x)


@pytest.fixture(scope="module")
def x():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


@compiles
def test_a_kernel_is_compiled_once_and_then_loaded_for_all_shapes_it_holds_for(kept, x, capsys):
    first = kernels_of(even_or_odd)
    assert torch.equal(run(first, x), x * 2.5)
    assert torch.equal(run(first, x[:4, :6].contiguous()), x[:4, :6] * 2.5)
    assert first.compiled.times == 1
    assert tally.take().startswith("1 kernels compiled and 0 loaded in ")
    said = capsys.readouterr().err
    assert said.startswith("note   compiling the casts of this recipe, a few seconds each; ")
    assert said.endswith(f"they are kept for later runs in {kept}\n")
    later = kernels_of(even_or_odd)  # as another process has it
    assert torch.equal(run(later, x[:2].contiguous()), x[:2] * 2.5)
    assert later.compiled.times == 0
    assert tally.take().startswith("0 kernels compiled and 1 loaded in ")
    assert tally.take() is None
    odd = x[:, :5].contiguous()
    assert torch.equal(run(later, odd), odd - 1.0)  # with other guards
    assert later.compiled.times == 1
    assert torch.equal(run(later, x), x * 2.5)
    last = kernels_of(even_or_odd)
    assert torch.equal(run(last, odd), odd - 1.0)
    assert (last.compiled.times, tally.loaded) == (0, 2)
    assert capsys.readouterr().err == ""  # reported once
    other = kernels_of(even_or_odd, "another")
    run(other, x)
    assert other.compiled.times == 1
    assert {file.stat().st_mode & 0o077 for file in kept.glob("*.kernel")} == {0}


@compiles
def test_a_damaged_kernel_is_built_again(kept, x, capsys):
    run(kernels_of(even_or_odd), x)
    (file,) = kept.glob("*.kernel")
    whole = file.read_bytes()
    for content in (b"", whole[:-1], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        file.write_bytes(content)
        again = kernels_of(even_or_odd)
        assert torch.equal(run(again, x), x * 2.5)
        assert again.compiled.times == 1
        assert f"{file} is damaged and is built again" in capsys.readouterr().err
    run(kernels_of(even_or_odd, "another"), x)
    (other,) = set(kept.glob("*.kernel")) - {file}
    other.write_bytes(file.read_bytes())  # whole, and another's
    again = kernels_of(even_or_odd, "another")
    run(again, x)
    assert again.compiled.times == 1


@compiles
def test_native_code_that_is_damaged_is_built_again(kept, x, capsys):
    run(kernels_of(even_or_odd), x)
    (file,) = kept.glob("*.kernel")
    names = kernel_cache.json.loads(file.read_bytes()[kernel_cache.SEAL_BYTES :].partition(b"\n")[0])
    library = next(name for name in names if name.endswith(".so"))
    with open(f"{library}.new", "wb") as new:  # another file of the name: this process runs the one that was
        new.write(b"\x7fELF")
    os.replace(f"{library}.new", library)
    again = kernels_of(even_or_odd)
    assert torch.equal(run(again, x), x * 2.5)
    assert f"{library} is damaged and is built again" in capsys.readouterr().err


def test_while_another_process_compiles_the_function_runs_as_it_is(kept, x, monkeypatch):
    kernels = kernels_of(even_or_odd)
    locks = []

    def held(path, **options):
        locks.append(FileLock(path))
        locks[-1].acquire()
        return FileLock(path, **options)

    monkeypatch.setattr(kernel_cache, "FileLock", held)
    assert kernels.of((x,)) is even_or_odd
    assert kernels.compiled.times == 0
    locks[0].release()


def open_to_others(path):
    path.mkdir()
    path.chmod(0o777)


def link(path):
    path.with_name("elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("plant", [open_to_others, link, lambda path: path.write_text("no folder")])
def test_a_folder_that_is_not_the_users_own_is_not_used(plant, kept, x, capsys):
    plant(kept)
    kernels = kernels_of(even_or_odd)
    assert kernels.of((x,)) is None
    assert kernels.of((x,)) is None
    said = capsys.readouterr().err
    assert said.startswith(f"note   {kept}: ")
    assert said.count("\n") == 1
    assert kernels.compiled.times == 0


def test_everything_that_shapes_a_kernel_is_in_its_key(x):
    def kind(*args):
        return repr(signature(args))

    origin = Origin(row=2)
    plain = kind(x, origin, 3, None)
    assert kind(x[:3].contiguous(), Origin(row=7), 4, None) == plain
    others = [
        kind(x.bfloat16(), origin, 3, None),
        kind(x.t(), origin, 3, None),
        kind(x[:1], origin, 3, None),
        kind(x[1:], origin, 3, None),
        kind(x[0], origin, 3, None),
        kind(x.clone().requires_grad_(), origin, 3, None),
        kind(torch.nn.Parameter(x), origin, 3, None),
        kind(x, Origin(row=1), 3, None),
        kind(x, origin, 1, None),
        kind(x, origin, -3, None),
        kind(x, origin, 3, True),
        kind(x, origin, 3.5, None),
    ]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        others.append(kind(x, origin, 3, None))
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        others.append(kind(x, origin, 3, None))
    with torch.autocast("cpu"):
        others.append(kind(x, origin, 3, None))
    assert len({plain, *others}) == 1 + len(others)


CASTS = dict.fromkeys(
    cast for name in RECIPES for casts in load(name).cast_sets().values() for cast in casts.values() if cast.quantizes
)


class Spied:
    """A cast that notes which of its fields are read."""

    def __init__(self, cast):
        self.cast, self.read = cast, set()

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self.cast, name)


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: f"{cast.format}-{cast.block}-{cast.scale}-{cast.rounding}")
def test_casts_share_a_kernel_where_they_read_the_same(cast):
    """A cast's function reads only values in its kernel's key, and square blocks have no direction."""
    y = torch.randn(33, 70, generator=torch.Generator().manual_seed(1)).bfloat16()
    key, one = torch.tensor(7), torch.ones(())
    for axis in (0, 1):
        spied, shape = Spied(cast), block_shape(cast.block, axis)
        given = None, one, key, Origin(row_stride=70)
        made = quantize.cast_blocks(blocked(y, shape), spied, shape, *given)
        by = inductor.cast_by(cast, axis, "eager")
        assert by.shape == shape
        assert all(map(same, by.function(blocked(y, shape), *given), made))
        kept, read = quantize.read_by_cast(cast), spied.read - {"is_square"}
        assert {name: getattr(kept, name) for name in read} == {name: getattr(cast, name) for name in read}
    if cast.is_square or shape is None:
        assert inductor.cast_by(cast, 0, "eager").function is inductor.cast_by(cast, 1, "eager").function


def same(a, b):
    return a is b if a is None or b is None else torch.equal(a, b)


def test_warm_clears_kernels_and_nothing_else(kept, capsys, tmp_path):
    assert main(["warm", "--clear"]) == 0
    assert f"removed 0 bytes of kernels in {kept}" in capsys.readouterr().out
    kept.mkdir()
    (kept / "a.kernel").write_bytes(b"1234")
    (tmp_path / "mine").write_bytes(b"1")
    assert main(["warm", "--clear"]) == 0
    assert f"removed 4 bytes of kernels in {kept}" in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == [tmp_path / "mine"]
    assert main(["warm", "--clear", "precision=mxfp8"]) == 2
    assert "--clear: deletes the kernels" in capsys.readouterr().err


def test_warm_rejects_impossible_runs(capsys):
    assert main(["warm", "precision=mxfp8,mxfp9"]) == 2
    assert "mxfp9" in capsys.readouterr().err
