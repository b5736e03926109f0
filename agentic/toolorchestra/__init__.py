"""ToolOrchestra: a small trained policy that routes among tools and larger models (arXiv 2511.21689), as hooks."""
