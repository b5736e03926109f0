"""Passage retrieval for the `search` tool: a FAISS index over a corpus, served over HTTP.

    python -m agentic.toolorchestra.retrieval.build --corpus FILE.jsonl --output DIR
    python -m agentic.toolorchestra.retrieval.serve --corpus FILE.jsonl | --index DIR

Leaves out: web search, and which passages a policy gets to see (the QA environment).
"""
