"""A run with phases in its mixture and a validation-only source, resumed and uninterrupted. 12 seconds."""

import json
import random

from lightning_llm.__main__ import main

PHASES = "+data.mixture={kind: phases, phases: {main: {weights: {b: 0}}, anneal: {start: 0.5, weights: {b: 3}}}}"


def records_in(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "time"} for record in records]


def test_phases_resume_exactly_and_what_is_watched_changes_nothing(tmp_path, small_run, capsys):
    generator = random.Random(1)
    texts = [" ".join(generator.choice(("stone", "river", "cloud", "seed")) for _ in range(90)) for _ in range(40)]
    file = tmp_path / "b.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = f"+data.sources.b={{loader: jsonl, path: {file}}}"
    watched = f"+data.sources.w={{loader: jsonl, path: {file}, role: validation}}"

    def run(name, *more):
        assert main(["train", *small_run(tmp_path, source, PHASES, f"run.dir={tmp_path / name}", *more)]) == 0
        return records_in(tmp_path / name)

    plain = run("plain")
    told = capsys.readouterr().out
    assert "phase  main, steps 1 to 3: jsonl 384 tokens" in told
    assert "phase  anneal, steps 4 to 6: jsonl 96 tokens" in told
    assert "| b 288 tokens" in told
    run("watching", watched, "data.mixture.total_steps=6", "trainer.max_steps=3", "schedule.total_steps=6")
    assert "w validation only (" in capsys.readouterr().out
    words = [watched, "data.mixture.total_steps=6", "schedule.total_steps=6", "resume=auto"]
    resumed = run("watching", *words)
    steps = [record for record in resumed if "grad_norm" in record]
    assert steps == [record for record in plain if "grad_norm" in record]
    assert [record["step"] for record in resumed if "val_loss/w" in record] == [0, 3, 6]
    assert [record["step"] for record in plain if "val_loss" in record] == [3, 6]
    unwatched = [
        {key: value for key, value in record.items() if key != "val_loss/w"} for record in resumed if record["step"]
    ]
    assert unwatched == plain
