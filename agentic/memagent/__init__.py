"""MemAgent: reading a document of any length with a memory of fixed size (arXiv 2507.02259), as hooks for slime."""
