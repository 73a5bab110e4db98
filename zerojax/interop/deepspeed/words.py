"""DeepSpeed's names of optimizers, and its keys without a counterpart."""

_ADAM = ("adamw", None)
_COMPRESSED = (
    "compresses its momentum after a warm-up; here gradients are compressed from the start (zero.grads)"
)

OPTIMIZERS: dict[str, tuple[str, str | None]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "fusedadam": _ADAM,
    "deepspeedcpuadam": ("adamw", "runs on the devices"),
    "onebitadam": ("adamw", _COMPRESSED),
    "zerooneadam": ("adamw", _COMPRESSED),
    "lion": ("lion", None),
    "fusedlion": ("lion", None),
    "sgd": ("sgd", None),
    "muon": ("muon", "scales updates to AdamW's size (Liu et al., 2025), so that both share a learning rate"),
}
"""Type in lower case -> zerojax's optimizer, and how it differs."""

_BUCKETS = "the compiler schedules collectives layer by layer; there is nothing to tune"
_SAVING = "checkpoints are whole and unsharded, for any mesh; zerojax export writes them for other programs"

_OF_ZERO = {
    _BUCKETS: (
        *("overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "sub_group_size"),
        *("allgather_partitions", "allgather_bucket_size", "round_robin_gradients"),
        *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
        *("stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
    ),
    _SAVING: (
        *("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        *("elastic_checkpoint", "load_from_fp32_weights"),
    ),
    "zerojax schedules copies to and from host memory layer by layer, from page-locked memory": (
        f"{table}.{name}"
        for table in ("offload_optimizer", "offload_param")
        for name in (
            "pin_memory",
            "nvme_path",
            "buffer_count",
            "buffer_size",
            "fast_init",
            "max_in_cpu",
            "ratio",
        )
    ),
    "there are two levels, node and device: hpz keeps a partition in every node": ("mics_shard_size",),
    "zero.error_feedback sets error feedback": ("zeropp_loco_param",),
    "frozen weights are sent like all weights": ("zero_quantized_nontrainable_weights",),
}
_OF_FP16 = (
    *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis"),
    *("min_loss_scale", "auto_cast"),
)
NOTES: dict[str, str] = {
    **{f"zero_optimization.{name}": why for why, names in _OF_ZERO.items() for name in names},
    **{f"fp16.{name}": "bfloat16 needs no loss scaling" for name in _OF_FP16},
    "amp": "bf16.enabled sets the compute dtype",
    "data_types": "sums of gradients are always fp32",
    "prescale_gradients": "sums of gradients are fp32 and are divided once",
    "gradient_predivide_factor": "sums of gradients are fp32 and are divided once",
    "activation_checkpointing": "zero.remat says what the backward pass recomputes",
    "csv_monitor": "RUN/metrics.jsonl always has every step",
    "comet": "trackers are tensorboard, wandb and mlflow",
    "flops_profiler": "MFU is always reported; zerojax train --profile 10:12 traces steps",
    "wall_clock_breakdown": "zerojax train --profile 10:12 traces steps",
    "tensorboard.output_path": "events are written to RUN/tensorboard",
    "tensorboard.job_name": "events are written to RUN/tensorboard",
    "checkpoint": _SAVING,
    "zero_allow_untested_optimizer": "zerojax refuses an optimizer that is wrong on shards",
    "elasticity": "a run resumes on any number of devices that divides the batch size",
}
"""Key -> why there is nothing to set."""
