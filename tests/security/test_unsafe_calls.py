"""Functions that run code from files are called in few places, each with its reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    ("pickle.load", "lightning_llm/data/tokens/encode.py"),  # from its own child, by a pipe
    ("pickle.loads", "lightning_llm/config/compose.py"),  # what this process has pickled, in memory
    ("pickle.loads", "lightning_llm/config/sources.py"),  # the same
    ("pickle.Unpickler", "lightning_llm/train/checkpoint/tensor_storage.py"),  # which admits a few classes by name
    (
        "torch.compiler.load_compiled_function",
        "lightning_llm/precision/cast/kernel_cache.py",
    ),  # a user's folder
}
RUN_WHAT_THEY_READ = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "dill.load",
    "dill.loads", "joblib.load", "marshal.load", "marshal.loads", "shelve.open", "yaml.unsafe_load", "yaml.full_load",
    "eval", "exec",
    "os.system", "os.popen", "torch.compiler.load_compiled_function", "torch.jit.load", "torch.hub.load",
}  # fmt: skip
BY_ANY_NAME = {"download_artifacts", "load_artifact", "list_artifacts"}
"""MLflow's methods on any object: an artifact may be a model, which is pickled code."""


def name_of(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def found_in(text: str, where: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            called = [name for base in node.bases if (name := name_of(base)) in RUN_WHAT_THEY_READ]
            yield from (f"{name} in {where}" for name in called if (name, where) not in ALLOWED)
        if not isinstance(node, ast.Call):
            continue
        called, keywords = name_of(node.func), {each.arg: ast.unparse(each.value) for each in node.keywords}
        wrong = {
            called: called in RUN_WHAT_THEY_READ and (called, where) not in ALLOWED,
            f".{called.rpartition('.')[2]}": called.rpartition(".")[2] in BY_ANY_NAME,
            f"MLflow's {called}": called.startswith("mlflow.") and called.endswith(".load_model"),
            "torch.load without weights_only=True": called == "torch.load" and keywords.get("weights_only") != "True",
            "allow_pickle": keywords.get("allow_pickle", "False") != "False",
            "trust_remote_code": keywords.get("trust_remote_code", "False") != "False",
            "shell": called.startswith("subprocess.") and keywords.get("shell", "False") != "False",
            "yaml.load without a safe loader": called == "yaml.load"
            and not any("Loader" in ast.unparse(each) for each in [*node.args[1:], *(k.value for k in node.keywords)]),
        }
        yield from (f"{name} in {where}, line {node.lineno}" for name, is_wrong in wrong.items() if is_wrong)


def test_nothing_else_runs_what_it_reads() -> None:
    files = [*ROOT.glob("lightning_llm/**/*.py"), *ROOT.glob("callbacks/**/*.py")]
    assert len(files) > 300
    assert [each for file in files for each in found_in(file.read_text(), str(file.relative_to(ROOT)))] == []


@pytest.mark.parametrize(
    "planted",
    [
        "pickle.loads(content)", "torch.load(file)", "torch.load(file, weights_only=False)", 
        "client.download_artifacts(x)", "mlflow.pyfunc.load_model(x)",
        "np.load(file, allow_pickle=True)", "load_dataset(path, trust_remote_code=True)", "eval(text)",
        "subprocess.run(text, shell=True)", "yaml.load(text)", "class Own(pickle.Unpickler): pass",
    ],
)  # fmt: skip
def test_a_planted_call_is_found(planted: str) -> None:
    assert list(found_in(planted, "lightning_llm/x.py"))
