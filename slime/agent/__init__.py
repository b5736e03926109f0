"""Endpoints for agents that only know a base URL: their conversations become training samples, token by token.

`adapters` speak OpenAI's and Anthropic's protocols and ask the engine with token ids; `trajectory` keeps one message
tree per session and cuts it into samples; `rendering` turns messages into ids at the price of the new messages;
`parsing` reads tool calls out of model text; `sandbox` and `harness` start command-line agents; `aiohttp_threaded` runs
an adapter beside the rollout loop. Leaves out: rewards, and the rollout function that opens and finishes sessions.
"""
