"""Protocols agents speak: OpenAI (Chat Completions, Responses) and Anthropic (Messages), on one turn pipeline."""
