"""Keys and callbacks of Lightning that have another name here or are refused, each with the key that does the same."""

LIGHTNING_CALLBACKS = "lightning.pytorch.callbacks"
CALLBACK = "lightning.pytorch.callbacks.callback.Callback"

_CHECKPOINT = "checkpoint.every_steps and checkpoint.keep_last say when the whole state is saved"
_BAR = "callbacks.progress is the bar, callbacks.progress=null leaves it out"
_ALL_TRAIN = "every parameter trains, from the first step to the last"

REFUSED_CALLBACKS = {
    "Checkpoint": _CHECKPOINT,
    "ModelCheckpoint": _CHECKPOINT,
    "OnExceptionCheckpoint": _CHECKPOINT,
    "GradientAccumulationScheduler": "data.global_batch_size over data.micro_batch_size is what is accumulated",
    "ProgressBar": _BAR,
    "TQDMProgressBar": _BAR,
    "RichProgressBar": _BAR,
    "StochasticWeightAveraging": "lightning.pytorch.callbacks.EMAWeightAveraging or .WeightAveraging averages weights, "
    "schedule=constant|wsd sets the learning rate",
    "BatchSizeFinder": "data.micro_batch_size sets it; plan shows the memory it needs",
    "LearningRateFinder": "train -m optim.learning_rate=1e-3,3e-3 tries several",
    "SpikeDetection": "spikes.policy says what is done about spikes",
    "ThroughputMonitor": "callbacks.throughput measures it",
    "BaseFinetuning": _ALL_TRAIN,
    "ModelPruning": _ALL_TRAIN,
    "BasePredictionWriter": "there is nothing to predict in training",
}
"""Lightning's callbacks that would fight what has the step, the checkpoints and the terminal here."""

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
"""Arguments of Lightning's Trainer that are no keys of `trainer` here -> what sets the same."""
