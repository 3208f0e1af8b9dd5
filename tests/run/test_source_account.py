"""The terminal and the summary of a run account for the files and documents that its sources lost."""

import gzip
import json

from lightning_llm.__main__ import main


def test_skipped_files_are_reported_in_the_terminal_and_in_the_summary(small_run, corpus_folder, tmp_path, capsys):
    folder = tmp_path / "corpus [v1]"
    (folder / ".git").mkdir(parents=True)
    lines = (corpus_folder / "documents.jsonl").read_text().splitlines(keepends=True)
    (folder / "0.jsonl").write_text("".join(lines[:60]))
    (folder / "1.jsonl.gz").write_bytes(gzip.compress("".join(lines[60:]).encode()))
    (folder / "2.jsonl.br").write_bytes(b"brotli")
    (folder / "._0.jsonl").write_bytes(b"\0\5\26\7")
    more = [f"data.sources.jsonl.path='{folder}'", f"data.cache_dir={tmp_path / 'cache'}", "data.tokenizer.kind=bytes"]
    more = [*more, "data.tokenizer.vocab_size=null", "trainer.max_steps=1", "schedule.warmup_steps=1"]
    assert main(["train", *small_run(tmp_path, *more)]) == 0
    line = (
        "data.sources.jsonl: 2 files read (1 .jsonl, 1 .jsonl.gz); 3 not: 2 hidden, 1 another ending "
        f"(such as '{folder / '._0.jsonl'}')"
    )
    assert f"note   {line}\n" in capsys.readouterr().out
    account = json.loads((tmp_path / "run" / "summary.json").read_text())["data_sources"]["jsonl"]
    assert account["files"] == 2
    assert account["skipped_files"] == {"hidden": 2, "another ending": 1}
    assert account["skipped_examples"][2] == f"{folder / '2.jsonl.br'}: another ending"
    assert account["documents"] == 120
    assert main(["prepare", *small_run(tmp_path, *more)]) == 0
    assert f"{line}\n" in capsys.readouterr().out
    assert main(["prepare", *small_run(tmp_path, *more), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sources"]["jsonl"]["account"] == account
