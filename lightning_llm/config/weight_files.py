"""Names of the files of a folder of weights beside those of tensors, and of keys; `TOKENIZER` is in a run's, too."""

IMPORTED = "weights.json"
"""Of a folder that `import` made: what the weights are, and what was written."""
HUGGINGFACE = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
UNNAMED = "???"
"""`model.init_from` of a recipe that continues from weights: not named yet. `plan` takes it, `train` does not."""
NOT_SHAPE = ("name", "init_from", "parameters_published")
"""Keys of `model` that say nothing of its shape."""
