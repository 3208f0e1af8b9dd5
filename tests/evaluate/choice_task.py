"""A task of lm-eval as a user writes one, which needs no network."""

import json
from pathlib import Path


def choice_task(folder: Path) -> Path:
    """Write a multiple-choice task with its documents; return its file."""
    documents = [{"q": "the of", "choices": [" and to", " not he"], "gold": i % 2} for i in range(6)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    file = folder / "my_choice.yaml"
    file.write_text(
        f"task: my_choice\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/documents.jsonl\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{gold}}'\n"
        "doc_to_choice: '{{choices}}'\nmetric_list:\n  - metric: acc\n    aggregation: mean\n"
        "    higher_is_better: true\n"
        "metadata:\n  version: 1.0\n"
    )
    return file
