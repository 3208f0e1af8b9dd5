"""Values derived from a config are computed once between the overrides and the first step."""

import sys
from collections import Counter

from lightning_llm.__main__ import main

RESOLVERS = {
    ("lightning_llm.plan.degrees", "resolve_degrees"),
    ("lightning_llm.precision.native.decide", "decide"),
    ("lightning_llm.config.config_hash", "config_hash"),
    ("lightning_llm.data.check", "data_rules"),
    ("lightning_llm.run.resume.start", "decide_start"),
}


def test_each_resolver_is_called_once_in_a_run(tmp_path, small_run):
    called: Counter[tuple[str, str]] = Counter()

    def count(frame, event, argument):
        key = (frame.f_globals.get("__name__", ""), frame.f_code.co_name)
        if event == "call" and key in RESOLVERS:
            called[key] += 1

    sys.setprofile(count)
    try:
        assert main(["train", *small_run(tmp_path, "trainer.max_steps=1", "schedule.warmup_steps=1")]) == 0
    finally:
        sys.setprofile(None)
    assert called == dict.fromkeys(RESOLVERS, 1)
