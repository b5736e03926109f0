"""FSDP2 training back end: one code path for gloo on a laptop and NCCL on a cluster.

`trainer.FSDPTrainer` is the entry; it knows nothing of Ray, so a test can run it under `torch.multiprocessing`. The parts:
`distributed` (process groups, exit), `model` (load, wrap, shard), `packing` and `batches` (rows to one packed sequence),
`advantages` and `loss` (which mathematics is used where), `optimizer`, `checkpoint`, `hf_export`, `update_weight`.

Left out: tensor, pipeline, context and expert parallelism, critics. `capabilities.check_supported` refuses their flags.
"""
