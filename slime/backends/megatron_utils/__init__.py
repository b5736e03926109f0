"""Megatron-core back end. Weights: `transformer_config` (which models), `param_names` (which tensors make up which parameter),
`hf_to_megatron` and `megatron_to_hf` (a model's weights, cut and gathered), `torch_dist` (the checkpoint format, without a model).
"""
