"""From documents to batches: sources -> tokenizer -> memory-mapped token cache -> stateless order -> `Corpus`.

`lightning_llm.data.check` has the cheap checks, without torch; `lightning_llm.data.opening` returns a `Corpus`.
"""
