"""Rollout room: data source, generation loop, filters, rewards and conversion to train data. Knows no training backend."""
