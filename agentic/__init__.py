"""Agentic reinforcement-learning methods, one package per method, on slime's public hook surface."""
