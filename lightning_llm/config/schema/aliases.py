"""Names of keys in other trainers, for messages, and in earlier releases, for migration of their config.yaml files.

Other trainers are Lightning, Hugging Face, Megatron-LM, nanoGPT and DeepSpeed; values and callbacks have aliases, too.
"""

import re
from collections.abc import MutableMapping
from typing import Any

LIGHTNING_CALLBACKS = "lightning.pytorch.callbacks"
CALLBACK = "lightning.pytorch.callbacks.callback.Callback"

_CHECKPOINT = "checkpoint.every_steps and checkpoint.keep_last set when the full state is saved"
_BAR = "callbacks.progress is the bar, callbacks.progress=null removes it"
_ALL_TRAIN = "every parameter is trained in every step"

REFUSED_CALLBACKS = {
    "Checkpoint": _CHECKPOINT,
    "ModelCheckpoint": _CHECKPOINT,
    "OnExceptionCheckpoint": _CHECKPOINT,
    "GradientAccumulationScheduler": "data.global_batch_size over data.micro_batch_size sets the accumulation",
    "ProgressBar": _BAR,
    "TQDMProgressBar": _BAR,
    "RichProgressBar": _BAR,
    "StochasticWeightAveraging": "lightning.pytorch.callbacks.EMAWeightAveraging or .WeightAveraging averages weights, "
    "schedule=constant|wsd sets the learning rate",
    "BatchSizeFinder": "data.micro_batch_size sets it; plan shows the memory it needs",
    "LearningRateFinder": "train -m optim.learning_rate=1e-3,3e-3 tries several",
    "SpikeDetection": "spikes.policy sets the response to spikes",
    "ThroughputMonitor": "callbacks.throughput measures it",
    "BaseFinetuning": _ALL_TRAIN,
    "ModelPruning": _ALL_TRAIN,
    "BasePredictionWriter": "there is nothing to predict in training",
}
"""Lightning's callbacks that conflict with this trainer's step, checkpoints or terminal -> alternative."""

TRAINER_KEYS = {
    "accelerator": "trainer.accelerator",
    "accumulate_grad_batches": "data.global_batch_size and data.micro_batch_size (accumulation follows from them)",
    "benchmark": "trainer.deterministic",
    "callbacks": "the group callbacks",
    "check_val_every_n_epoch": "trainer.validate_every_steps",
    "default_root_dir": "run.root or run.dir",
    "enable_checkpointing": "checkpoint.every_steps",
    "enable_progress_bar": "callbacks.progress=null",
    "fast_dev_run": "trainer.max_steps=1",
    "gradient_clip_algorithm": "optim.gradient_clip_norm (the global 2-norm)",
    "gradient_clip_val": "optim.gradient_clip_norm",
    "limit_train_batches": "trainer.max_steps",
    "limit_val_batches": "data.validation.sequences",
    "log_every_n_steps": "metrics.jsonl, which has every step",
    "logger": "the group logger",
    "max_epochs": "trainer.max_steps",
    "min_epochs": "trainer.max_steps",
    "min_steps": "trainer.max_steps",
    "num_nodes": "world for plan; torchrun or srun starts ranks on several machines",
    "num_sanity_val_steps": "trainer.validate_every_steps",
    "overfit_batches": "data.sources",
    "plugins": "the group precision",
    "precision": "the group precision (precision=bf16)",
    "profiler": "callbacks=profile",
    "reload_dataloaders_every_n_epochs": "data.sources",
    "strategy": "the group parallel (parallel=zero3)",
    "sync_batchnorm": "the group parallel",
    "use_distributed_sampler": "the group parallel",
    "val_check_interval": "trainer.validate_every_steps",
}
"""Arguments of Lightning's Trainer that are not keys of `trainer` here -> equivalent keys."""
_PRECISION = "the group precision (precision=bf16)"
_PARALLEL = "the group parallel (parallel=zero3; lightning-llm config --group parallel lists them)"
_ACCUMULATION = "data.global_batch_size over data.micro_batch_size and the data-parallel ranks (it follows from them)"

_WORDS = {
    "model.num_layers": "num_hidden_layers n_layer n_layers",
    "model.hidden_size": "n_embd d_model embed_dim embedding_dim",
    "model.num_heads": "num_attention_heads n_head n_heads",
    "model.num_kv_heads": "num_key_value_heads num_query_groups n_kv_heads kv_heads",
    "model.head_dim": "kv_channels",
    "model.ffn_hidden_size": "intermediate_size n_inner d_ff ffn_dim",
    "model.max_sequence_length": "max_position_embeddings n_positions n_ctx max_seq_len",
    "model.norm": "normalization norm_type",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_epsilon",
    "model.rope_theta": "rotary_base rope_base",
    "model.activation": "hidden_act activation_function",
    "model.bias": "attention_bias mlp_bias add_bias_linear",
    "model.tie_embeddings": "tie_word_embeddings",
    "model.init_std": "initializer_range init_method_std",
    "data.sequence_length": "seq_length seq_len block_size context_length max_seq_length",
    "data.micro_batch_size": "per_device_train_batch_size per_device_batch_size train_micro_batch_size_per_gpu "
    "local_batch_size",
    "data.global_batch_size": "train_batch_size total_batch_size",
    "data.num_workers": "dataloader_num_workers",
    "data.tokenize_processes": "preprocessing_num_workers num_proc dataset_num_proc",
    "data.tokenizer.path": "tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_model",
    "optim.learning_rate": "lr max_lr",
    "optim.weight_decay": "wd",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon adam_eps",
    "optim.gradient_clip_norm": "max_grad_norm clip_grad grad_clip max_norm",
    "schedule.warmup_steps": "warmup num_warmup_steps lr_warmup_iters lr_warmup_steps warmup_iters",
    "schedule.total_steps": "lr_decay_iters lr_decay_steps",
    "schedule.final_factor": "min_lr_ratio min_lr_factor",
    "schedule.final_learning_rate": "min_lr",
    "trainer.max_steps": "train_iters max_iters num_train_steps train_steps max_train_steps num_iterations iterations",
    "trainer.validate_every_steps": "eval_steps eval_interval eval_every val_interval",
    "trainer.devices": "gpus num_gpus n_gpus ngpus nproc_per_node num_devices",
    "trainer.accelerator": "device use_cpu",
    "trainer.compile": "torch_compile",
    "checkpoint.every_steps": "save_steps save_interval save_every",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.asynchronous": "async_save async_checkpoint async_mode",
    "parallel.tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel tp_size tensor_parallel_degree",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel pp_size "
    "pipeline_parallel_degree",
    "parallel.cp": "context_parallel_size context_parallel cp_size context_parallel_degree",
    "parallel.ep": "expert_model_parallel_size expert_parallel_size expert_parallel ep_size expert_parallel_degree",
    "parallel.dp_shard": "data_parallel_shard_degree dp_shard_size",
    "parallel.dp_replicate": "data_parallel_replicate_degree dp_replicate_size",
    "parallel.activation_checkpoint": "gradient_checkpointing activation_checkpointing recompute recompute_granularity",
    "run.name": "run_name experiment_id",
    "run.root": "output_dir out_dir save_dir",
    "resume": "resume_from_checkpoint resume_from",
    "model.init_from": "initial_load_path initial_checkpoint_dir model_name_or_path",
    "seed": "random_seed",
    _PRECISION: "bf16 fp16 fp32 fp8 mixed_precision dtype torch_dtype amp",
    _PARALLEL: "fsdp fsdp_config deepspeed zero ddp use_fsdp",
    _ACCUMULATION: "gradient_accumulation_steps grad_accum_steps gradient_accumulation accumulation_steps",
    "data.global_batch_size (sequences per step) and data.micro_batch_size (per rank and forward)": "batch_size bs",
    "trainer.max_steps (runs are counted in steps)": "num_train_epochs epochs num_epochs",
    "schedule.warmup_steps (in steps)": "warmup_ratio warmup_fraction lr_warmup_fraction",
    "data.validation.sequences (sequences scored at each validation)": "eval_iters max_eval_samples",
    "the group schedule (schedule=cosine)": "lr_scheduler lr_scheduler_type lr_decay_style scheduler",
    "the group optim (optim=adamw)": "optimizer optimizer_type",
    "the group data (data=jsonl data.sources.jsonl.path=FILE)": "dataset dataset_name train_file data_path",
    "the group logger (logger=wandb)": "report_to wandb wandb_project tensorboard_dir",
    "metrics.jsonl, which has every step": "logging_steps log_interval log_every",
}
ALIASES = {alias: ours for ours, aliases in _WORDS.items() for alias in aliases.split()}
KEY = re.compile(r"[a-z_0-9]+(\.[a-z_0-9]+)*")
VALUES = {
    "data": {"json": "jsonl", "ndjson": "jsonl", "txt": "text", "hf": "huggingface", "datasets": "huggingface"},
    "logger": {"tb": "tensorboard", "null": "none", "None": "none"},
    "callbacks": {"null": "none", "None": "none"},
    "optim": {"adam": "adamw", "AdamW": "adamw", "adamw_torch": "adamw"},
    "parallel": {"fsdp": "zero3", "fsdp2": "zero3", "full_shard": "zero3", "deepspeed": "zero3", "none": "single"},
    "precision": {
        "bfloat16": "bf16", "bf16-mixed": "bf16", "bf16-true": "bf16_true", "float16": "fp16", "16-mixed": "fp16",
        "half": "fp16", "float32": "fp32", "32-true": "fp32", "32": "fp32", "16": "fp16",
    },
}  # fmt: skip
"""{group: {value in other trainers: value here}}."""


def known_elsewhere(key: str) -> str | None:
    """Return the end of a message that names our key for `key` of another trainer: " Did you mean 'KEY'?".

    None if `key` is not a key of another trainer.
    """
    key = key.lower().replace("-", "_")
    ours = ALIASES.get(key) or TRAINER_KEYS.get(key)
    if ours is None:
        return None
    return f" Did you mean '{ours}'?" if KEY.fullmatch(ours) else f" Here it is {ours}."


RENAMED = {
    f"precision.modules.{key}": f"precision.modules.{key}_precision"
    for key in ("first_blocks_high", "last_blocks_high", "first_fraction_high", "last_fraction_high")
}
"""{first name of a dotted key: current name}. Hashes use the first name, so that they stay the same."""

ADDED = {
    "trainer.attention_kernel": "auto",
    "spikes.max_rollbacks": 3,
    "spikes.rollback_skip_steps": 2,
    "parallel.ep": 1,
}
"""{dotted key that affects training: value that reproduces the releases before it}. Configs of those releases are read
with this value, and hashes omit it, so that they stay the same."""

_FIRST_NAMES = {now: before for before, now in RENAMED.items()}


def first_name(key: str) -> str:
    """Return the name that the dotted `key` had in its first release; `key` itself if it was never renamed."""
    return _FIRST_NAMES.get(key, key)


def migrate(values: MutableMapping[Any, Any]) -> None:
    """Rename and add keys of a config that an earlier release wrote, in place.

    If a key is present under both names, both stay, and parsing reports the first as unknown.
    """
    for before, now in RENAMED.items():
        *parents, former = before.split(".")
        node: Any = values
        for parent in parents:
            node = node.get(parent) if isinstance(node, MutableMapping) else None
        name = now.rpartition(".")[2]
        if isinstance(node, MutableMapping) and former in node and name not in node:
            node[name] = node.pop(former)
    for key, value in ADDED.items():
        group, _, name = key.partition(".")
        if isinstance(node := values.get(group), MutableMapping):
            node.setdefault(name, value)
