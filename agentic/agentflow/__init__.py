"""AgentFlow: a trained planner among frozen roles (arXiv 2510.05592), as hooks for slime's rollout loop."""
