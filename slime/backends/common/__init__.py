"""What the training back ends share: from plain rollout data to a loss, and from whole tensors to the engines.

`trainer.Trainer` is one rank's rollout of work; a back end says how its model gives log-probs and takes a step. The parts:
`batches` and `packing` (rows to one packed sequence), `advantages` and `loss` (which mathematics is used where), `schedule` (learning
rate), `distributed` (process groups, exit), `update_weight` (weights to the engines), `checkpoint_files` and `hf_files` (layout on disk).

Back ends stand on this room and do not know each other. Left out: models, optimizers, anything of one engine.
"""
