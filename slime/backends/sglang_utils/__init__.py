"""The SGLang engine: processes, control calls and flags. See server.py, router.py, server_control.py, sglang_engine.py."""
