"""RL post-training on Ray, SGLang and torch: our own implementation of slime's public interface."""
