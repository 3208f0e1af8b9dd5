"""Detection of compilers: missing, failing, or producing code that does not round."""

import pytest
import torch
from torch._inductor import cpp_builder
from torch._inductor.exc import InductorError, InvalidCxxCompiler

from lightning_llm.base.errors import ConfigError
from lightning_llm.precision.cast import inductor, kernel_cache

MESSAGE = "CppCompileError: C++ compile error\n\nOutput:\n a.h:1:2: fatal error: bits/b.h: No such file\nmore"


def fails(*_):
    raise InductorError(RuntimeError(MESSAGE), None)


@pytest.fixture(autouse=True)
def fresh():
    """Clear the results that a process caches, before each test."""
    inductor.why_not.cache_clear()
    inductor.no_compiler.cache_clear()
    yield
    inductor.why_not.cache_clear()
    inductor.no_compiler.cache_clear()


@pytest.fixture
def nothing_kept(monkeypatch):
    """Compile planted functions, and load nothing from the cache."""
    monkeypatch.setattr(kernel_cache, "folder", lambda: None)


@pytest.mark.skipif(inductor.no_compiler("cpu") is not None, reason="no C++ compiler")
def test_a_compiler_that_works():
    assert inductor.why_not("cpu") is None


def test_no_compiler(monkeypatch):
    def missing():
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    assert "no C++ compiler was found (" in inductor.why_not("cpu")


@pytest.mark.usefixtures("nothing_kept")
def test_a_compiler_that_fails(monkeypatch):
    monkeypatch.setattr(inductor, "no_compiler", lambda device_type: None)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)
    assert "the compiler fails (" in inductor.why_not("cpu")
    assert "a.h:1:2: fatal error: bits/b.h: No such file" in inductor.why_not("cpu")


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize(("planted", "said"), [
    (lambda x: torch.stack([x, 1 / x.double()]), "(of 1024, 992 bf16 roundings and 0 quotients)"),
    (lambda x: torch.stack([x.bfloat16().float(), (1 / x).nextafter(x)]), "0 bf16 roundings and 1023 quotients)"),
])  # fmt: skip
def test_compiled_code_that_rounds_differently_is_rejected(planted, said, monkeypatch):
    monkeypatch.setattr(inductor, "no_compiler", lambda device_type: None)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda x: planted(x).float())
    assert inductor.why_not("cpu").startswith("compiled code is not eager's bits (of 1024, ")
    assert inductor.why_not("cpu").endswith(said)


def test_a_cast_that_fails_to_compile_names_the_way_out(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)
    with pytest.raises(ConfigError, match=r"compiling 'fails' failed: .*b\.h: No such file.* precision\.casts=eager"):
        inductor.compiled(fails)(torch.ones(2))
