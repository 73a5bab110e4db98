"""XLA descriptions of GPUs (GpuTargetConfigProto texts), read by zerojax.aot."""
