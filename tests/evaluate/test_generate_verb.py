"""`lightning-llm generate`: the text is the model's own, the same for a seed, and nothing impossible is begun."""

import io
import json
import shutil

import pytest
import torch

from lightning_llm import load
from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.cli.export import write_generation
from lightning_llm.config.compose import compose_config
from lightning_llm.data.tokens.tokenizer import Tokenizer
from lightning_llm.evaluate.weights import decoder_of
from lightning_llm.model.generate import generate
from lightning_llm.run.subject import find_subject, read_weights


def facts_of(capsys, *words):
    capsys.readouterr()
    assert main(["generate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def written(run, tokens, count, temperature=0.8, top_k=50, seed=0):
    """Return the tokens that the model generates after `tokens`, up to the end of the document."""
    subject, tokenizer = find_subject(run, [], None), Tokenizer(run)
    model = decoder_of(subject, read_weights(subject), torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    new = generate(model, torch.tensor([tokens]), count, temperature, top_k, generator)[0, len(tokens) :].tolist()
    return new[: new.index(tokenizer.end_of_document)] if tokenizer.end_of_document in new else new


def tokens_of(run, text):
    return Tokenizer(run).encode_batch([text])[0].tolist()


def test_the_text_is_the_models_own(trained, capsys):
    facts = facts_of(capsys, trained, "--prompt", "the of and", "--max-new-tokens", 40, "--seed", 3)
    prompt = tokens_of(trained, "the of and")
    assert facts["prompt_tokens"] == prompt
    assert facts["new_tokens"] == written(trained, prompt, 40, seed=3)
    assert facts["text"] == Tokenizer(trained).decode(facts["new_tokens"])
    assert (facts["step"], facts["seed"], facts["compute_dtype"]) == (4, 3, "fp32")


def test_a_seed_and_a_checkpoint_say_the_text(trained, capsys):
    words = trained, "--prompt", "", "--max-new-tokens", 30
    first = facts_of(capsys, *words)["new_tokens"]
    assert facts_of(capsys, *words)["new_tokens"] == first
    assert facts_of(capsys, *words, "--seed", 1)["new_tokens"] != first
    earlier = trained / "checkpoints" / "step=2", *words[1:]
    assert facts_of(capsys, *earlier)["step"] == 2
    greedy = facts_of(capsys, *words, "--temperature", 0)["new_tokens"]
    assert facts_of(capsys, *words, "--top-k", 1, "--seed", 5)["new_tokens"] == greedy
    assert facts_of(capsys, *words, "--top-p", 1e-9, "--seed", 6)["new_tokens"] == greedy


def test_prompt_and_text_are_printed(trained, capsys):
    words = "--prompt", "the of", "--max-new-tokens", "20"
    text = facts_of(capsys, trained, *words)["text"]
    assert main(["generate", str(trained), *words]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"the of{text}\n"
    assert "seed 0" in printed.err


def test_a_stop_string_ends_the_text_before_it(trained, capsys):
    words = trained, "--prompt", "the", "--max-new-tokens", 40
    text = facts_of(capsys, *words)["text"]
    stop = text[7:10]
    facts = facts_of(capsys, *words, "--stop", stop, "--stop", "never said")
    assert facts["text"] == text[: text.index(stop)]
    assert facts["finish_reason"] == "stop"


def test_chat_continues_the_conversation(trained, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the of\nand to\n"))
    assert main(["generate", str(trained), "--chat", "--max-new-tokens", "8", "--temperature", "0"]) == 0
    answers = capsys.readouterr().out
    line, other = tokens_of(trained, "the of\n"), tokens_of(trained, "and to\n")
    first = written(trained, line, 8, temperature=0)
    assert len(first) == 8  # and no end of a document, which the second line would follow
    second = written(trained, [*line, *first, *other], 8, temperature=0)
    decode = Tokenizer(trained).decode
    assert answers == f"{decode(first)}\n{decode(second)}\n"


def test_chat_forgets_when_the_context_is_full(trained, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the of\n" * 40 + "the " * 300 + "\n"))
    assert main(["generate", str(trained), "--chat", "--max-new-tokens", "4"]) == 0
    said = capsys.readouterr().err
    assert "the context is full" in said
    assert "line skipped" in said


def test_all_problems_are_reported_at_once(trained, tmp_path, capsys):
    wrong = ["--max-new-tokens", "0", "--temperature", "-1", "--top-k", "-2", "--top-p", "0", "--stop", ""]
    assert main(["generate", str(tmp_path / "nowhere"), *wrong]) == 2
    said = capsys.readouterr().err
    for part in ("7 problems", "--max-new-tokens=0: ", "--temperature=-1.0: ", "--top-k=-2: ", "--top-p=0.0: ",
                 "--stop: must not be empty", "--prompt: is missing", "does not exist"):  # fmt: skip
        assert part in said, part


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prompt", "the " * 200), "exceed model.max_sequence_length=128"),
        (("--prompt", "the", "--max-new-tokens", "128"), "Shorten it, or lower --max-new-tokens"),
        (("--chat", "--json"), "--json: cannot be used with --chat"),
    ],
)
def test_impossible_requests_are_rejected(trained, capsys, words, said):
    assert main(["generate", str(trained), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_stop_string_that_no_tokens_write_is_refused(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    content = json.loads((run / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (run / "tokenizer.json").write_text(json.dumps(content))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "tokenizer_digest": None}))
    assert main(["generate", str(run), "--prompt", "the " * 200, "--stop", "END", "--stop", "end"]) == 2
    said = capsys.readouterr().err
    assert "--stop='END': can never match: the tokenizer writes it as 'end'" in said
    assert "2 problems" in said  # and the prompt is too long


def test_a_run_without_its_tokenizer_or_with_a_damaged_checkpoint_is_refused(trained, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    file = next((copy / "checkpoints" / "step=4" / "tensors").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main(["generate", str(copy / "checkpoints" / "step=4"), "--prompt", "a"]) == 2
    assert file.name in capsys.readouterr().err
    (copy / "tokenizer.json").unlink()
    assert main(["generate", str(copy), "--prompt", "a"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


@pytest.fixture
def ending(exported, tmp_path):
    """A copy of a Hugging Face folder with an unusual end token, and a function that declares it."""
    folder = tmp_path / "its, own"  # a path with a comma and a space
    shutil.copytree(exported, folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<|fin▁|>"))

    def say(generation, config):
        for name, eos in (("generation_config.json", generation), ("config.json", config)):
            values = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(values | {"eos_token_id": eos}))
        return folder

    return say


def test_a_model_ends_with_the_tokens_that_its_files_name(trained, ending, capsys):
    words = "--prompt", "the of and", "--max-new-tokens", 40, "--seed", 3
    own = facts_of(capsys, trained, *words)["new_tokens"]
    second, fifth = own[1], next(token for token in own[2:] if token not in own[:2])
    for generation, config, end in ((fifth, 0, fifth), ([0, fifth, second], 0, second), (None, [fifth, 0], fifth)):
        facts = facts_of(capsys, ending(generation, config), *words, "--compute-dtype", "fp32")
        assert facts["new_tokens"] == own[: own.index(end)]
        assert facts["finish_reason"] == "end_of_document"


def test_the_end_of_document_token_is_named_by_files_or_the_caller(ending, tmp_path, capsys):
    folder, base, out = ending([5, 0], None), tmp_path / "base", tmp_path / "out"
    assert load(folder)[1].end_of_document == 5  # the first: none of them has a usual name
    assert main(["import", str(folder), "--output", str(base), "--no-parity"]) == 0
    assert load(base)[1].end_of_document == 5
    named = compose_config([f"model.init_from='{base}'"]).data.tokenizer
    assert Tokenizer(named.path, named.end_of_document).end_of_document == 5
    assert main(["export", str(base), "--output", str(out), "--no-parity"]) == 0
    for name in ("generation_config.json", "config.json"):
        assert json.loads((out / name).read_text())["eos_token_id"] == [5, 0]
    silent = ending(None, None)
    with pytest.raises(ConfigError, match=r"has no token .* Name the token that ends a document"):
        load(silent)
    assert load(silent, end_of_document="<|fin▁|>")[1].end_of_document == 0
    assert facts_of(capsys, silent, "--prompt", "a", "--max-new-tokens", 1, "--end-of-document", "<|fin▁|>")
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id has 'x', which is not a token id"):
        load(ending("x", None))


def test_end_tokens_of_a_run_are_added_to_those_of_its_initial_weights(tmp_path):
    file = tmp_path / "generation_config.json"
    for before, ends, after in (
        ({"eos_token_id": 7, "top_p": 0.9}, [5], {"eos_token_id": [5, 7], "top_p": 0.9}),
        ({"eos_token_id": [7, 5]}, [5], {"eos_token_id": [7, 5]}),
        ({"top_p": 0.9}, [5], {"eos_token_id": 5, "top_p": 0.9}),
        (None, [5], {"eos_token_id": 5}),
        (None, [], {}),
    ):
        file.unlink(missing_ok=True)
        if before is not None:
            file.write_text(json.dumps(before))
        write_generation(file, ends)
        assert json.loads(file.read_text()) == after
    file.write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ConfigError, match="'</s>', which is not a token id, in the folder that the run started from"):
        write_generation(file, [5])
