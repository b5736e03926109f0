"""FSDP2 training back end: one code path for gloo on a laptop and NCCL on a cluster.

`trainer.FSDPTrainer` is the entry; it knows nothing of Ray, so a test can run it under `torch.multiprocessing`. The order of work and
the mathematics are shared (`slime.backends.common`); here are `model` (load, wrap, shard), `optimizer`, `critic`, `checkpoint`,
`hf_export` and `offload`.

Left out: tensor, pipeline, context and expert parallelism. `capabilities.check_supported` refuses their flags.
"""
