"""Dynamic sampling filters: which finished groups of a rollout are kept."""
