"""A calculator as MCP server, for tests: standard input and output, or streamable HTTP with `--port N`."""

from __future__ import annotations

import logging
import os
import sys
import time

from mcp.server.mcpserver import MCPServer

app = MCPServer("calculator", log_level="CRITICAL")


@app.tool()
def calculate(left: float, operator: str, right: float = 0) -> str:
    """Computes `left operator right` for one of + - * /."""
    results = {"+": left + right, "-": left - right, "*": left * right}
    return f"{results[operator] if operator in results else left / right:g}"


@app.tool()
def total(numbers: list[float]) -> str:
    """Adds numbers."""
    return f"{sum(numbers):g}"


@app.tool()
def wait(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "done"


@app.tool()
def secret() -> str:
    """Shows two variables of the environment."""
    return f"{os.environ.get('GIVEN')} {os.environ.get('HIDDEN')}"


@app.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    if "--port" in sys.argv:
        app.run("streamable-http", host="127.0.0.1", port=int(sys.argv[sys.argv.index("--port") + 1]))
    else:
        app.run()
