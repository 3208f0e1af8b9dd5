"""From documents to batches: sources -> tokenizer -> memory-mapped token cache -> stateless order -> `Corpus`.

Import `lightning_llm.data.check` for the cheap checks (no torch) and `lightning_llm.data.corpus` for the rest.
"""
