"""Names of the files of a folder of weights beside those of tensors; `TOKENIZER` is one of a run's folder, too."""

IMPORTED = "weights.json"
"""Of a folder that `import` made: what the weights are, and what was written."""
HUGGINGFACE = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
