"""What a result was measured with: hashes of data and models, commit, and what an engine says of itself.

Invariants: nothing here changes a result; what cannot be found out is None or an empty mapping, never a guess.
Leaves out: the role table (`roles`).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import httpx

WEIGHTS = (".safetensors", ".bin")
# Sizes and names stay the same through training, so some of the weights are hashed as well: pieces spread over each file.
PIECES, PIECE_BYTES = 16, 65536


def sha256_file(path: str | Path) -> str:
    """Hex digest of the whole file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def model_fingerprint(path: str) -> dict[str, Any]:
    """Identity of a model directory: hashes of `config.json` and of the weights (index, names, sizes, 16 pieces a file).

    A name that is no directory here (a hub or service name) has only its name.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        return {"name": path}
    files = sorted(file for file in folder.iterdir() if file.suffix in WEIGHTS)
    digest = hashlib.sha256()
    for index in sorted(folder.glob("*.index.json")):
        digest.update(index.read_bytes())
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        _update_with_pieces(digest, file)
    sizes = sum(file.stat().st_size for file in files)
    config = sha256_file(folder / "config.json")
    return {"name": path, "config_sha256": config, "weights_sha256": digest.hexdigest(), "weights_bytes": sizes}


def _update_with_pieces(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        for piece in range(PIECES):
            file.seek(max(size - PIECE_BYTES, 0) * piece // (PIECES - 1))
            digest.update(file.read(PIECE_BYTES))


def commit() -> str | None:
    """Commit of the checkout that this package lies in, with `-dirty` when it has changes; None outside of one."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


async def engine_info(url: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """`/server_info` of an SGLang server (`/get_server_info` of an older one); empty when it has none."""
    async with httpx.AsyncClient(trust_env=False, timeout=timeout_s) as client:
        for path in ("/server_info", "/get_server_info"):
            try:
                response = await client.get(url + path)
                data = response.json() if response.status_code == 200 else None
            except (httpx.HTTPError, json.JSONDecodeError):
                continue
            if isinstance(data, dict):
                return data
    return {}
