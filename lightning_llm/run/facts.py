"""Facts of a run beside its config: what a comparison has to know of its data, its casts and its machine."""

from typing import Any

import torch

from lightning_llm.base.hardware import describe_device
from lightning_llm.base.integrity import digest_of_file
from lightning_llm.config.config_hash import config_digest, flatten
from lightning_llm.config.schema import Config
from lightning_llm.data.corpus import Corpus
from lightning_llm.model.flops import count_parameters
from lightning_llm.plan.coverage import coverage_of
from lightning_llm.plan.resolve import Plan
from lightning_llm.precision.native.decide import Decision
from lightning_llm.tracking.files import SOURCE_HASHES
from lightning_llm.tracking.files import TOKENIZER_DIGEST as TOKENIZER_DIGEST
from lightning_llm.tracking.provenance import code_hash, versions


def run_facts(config: Config, corpus: Corpus, decision: Decision) -> dict[str, Any]:
    """Return facts that a comparison of runs needs beside the config: size, data, threads, backend, coverage."""
    covered = coverage_of(config)
    return {
        "parameters": count_parameters(config.model).total,
        "data_hash": corpus.fingerprint,
        "validation_hash": corpus.validation_fingerprint,
        SOURCE_HASHES: corpus.source_fingerprints,
        TOKENIZER_DIGEST: digest_of_file(corpus.tokenizer.path),
        "validation_unigram_nats": corpus.validation_unigram_nats,
        **({"chosen_documents": corpus.chosen} if corpus.chosen else {}),
        "data_sources": {name: account.facts() for name, account in corpus.accounts.items()},
        "threads": torch.get_num_threads(),
        "backend": decision.runs if config.precision.quantises else None,  # where casts run
        "precision": decision.facts(),
        "quantized": covered.as_data() if covered else None,
    }


def config_facts(config: Config) -> dict[str, Any]:
    """Return what summaries and manifests say of the config: its seed, a digest of what may not change on resume."""
    return {"seed": config.seed, "config_digest": config_digest(flatten(config.model_dump()))}


def origin_here(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Return what the summary will say of the code and the machine."""
    return {
        "versions": versions(),
        "code_hash": code_hash(),
        "device": describe_device(device),
        "compiled": plan.compiled,
    }
