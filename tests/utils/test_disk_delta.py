"""Deltas of weights: encodings as properties; the writer and the local copy together, damage, gaps, and two engines on one host."""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slime.backends.common import update_weight
from slime.backends.common.delta_files import DeltaWriter, LocalCheckpoint, version_dir
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.utils.disk_delta import apply_delta, encode_delta


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))),
    st.sampled_from(["xor", "overwrite"]),
    st.sampled_from("BHIQ"),
)
def test_a_delta_gives_the_new_bytes(pairs: list[tuple[int, int]], encoding: str, kind: str) -> None:
    old, new = (np.array([pair[i] for pair in pairs], dtype=kind) for i in range(2))
    assert np.array_equal(apply_delta(encoding, old, encode_delta(encoding, old, new)), new)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_delta_of_another_tensor_is_refused(encoding: str) -> None:
    old, new = np.zeros(4, np.uint16), np.arange(4, dtype=np.uint16)
    payload = encode_delta(encoding, old, new)
    with pytest.raises(ValueError, match="bytes"):
        apply_delta(encoding, np.zeros(9, np.uint32), payload)


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {"a": torch.randn(5, 4).bfloat16(), "b": torch.randn(7), "c": torch.arange(3)}
    torch.manual_seed(seed)
    if seed:
        tensors["a"][seed % 5] = torch.randn(4).bfloat16()
        tensors["b"][seed % 7] = 0.5 * seed
    return tensors


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder, tensors = tmp_path / "base", weights(0)
    folder.mkdir()
    save_file({"a": tensors["a"]}, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file({k: tensors[k] for k in "bc"}, folder / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files | {"c": files["b"]}}))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return set(ours) == set(theirs) and all(
        torch.equal(ours[k], v) and ours[k].dtype == v.dtype for k, v in theirs.items()
    )


@pytest.mark.parametrize("encoding, digest", [("xor", "xxh3-128"), ("overwrite", "adler32")])
def test_the_local_copy_follows_the_trainer(base: Path, tmp_path: Path, encoding: str, digest: str) -> None:
    writer, local = DeltaWriter(tmp_path / "wire", base, encoding, digest), LocalCheckpoint(tmp_path / "local", base)
    assert same(read(local.pull(tmp_path / "wire", 0)), weights(0))
    sizes = []
    for version, seed in enumerate((0, 3, 5, 3), start=1):
        stats = writer.write(weights(seed).items())
        folder = local.pull(tmp_path / "wire", version)
        assert same(read(folder), weights(seed)) and (folder / "tokenizer.json").is_file()
        sizes.append(stats.changed)
    assert sizes[0] == 0 and 0 < sizes[1] <= 5
    assert [path.name for path in (tmp_path / "local").glob("weight_v*")] == ["weight_v000004"]
    late = LocalCheckpoint(tmp_path / "late", base)  # an engine that was away replays the chain
    assert same(read(late.pull(tmp_path / "wire", 4)), weights(3))


def test_values_are_sent_in_the_dtype_of_the_model(base: Path, tmp_path: Path) -> None:
    writer, local = DeltaWriter(tmp_path / "wire", base, "xor", "xxh3-128"), LocalCheckpoint(tmp_path / "local", base)
    writer.write((name, value.double() if value.is_floating_point() else value) for name, value in weights(2).items())
    assert same(read(local.pull(tmp_path / "wire", 1)), weights(2))


def test_damage_is_found_and_the_version_stays(base: Path, tmp_path: Path) -> None:
    writer, local = DeltaWriter(tmp_path / "wire", base, "overwrite", "xxh3-128"), LocalCheckpoint(
        tmp_path / "local", base
    )
    writer.write(weights(3).items())
    writer.write(weights(5).items())
    file = local.pull(tmp_path / "wire", 1) / "model-00002-of-00002.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1  # in `c` or the end of `b`; digests cover what a delta touches
    raw[-30] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ValueError, match="checksum .* remove the local directory"):
        local.pull(tmp_path / "wire", 2)
    assert json.loads((tmp_path / "local/current.json").read_text())["version"] == 1
    (tmp_path / "local/current.json").unlink()
    assert same(read(local.pull(tmp_path / "wire", 2)), weights(5))


def test_gaps_and_other_models_are_refused(base: Path, tmp_path: Path) -> None:
    writer, local = DeltaWriter(tmp_path / "wire", base, "xor", "xxh3-128"), LocalCheckpoint(tmp_path / "local", base)
    with pytest.raises(ValueError, match="no such version"):
        local.pull(tmp_path / "wire", 1)
    writer.write(weights(1).items())
    version_dir(tmp_path / "wire", 1).rename(version_dir(tmp_path / "wire", 2))
    writer.version = 2
    with pytest.raises(ValueError, match="no such version"):
        local.pull(tmp_path / "wire", 2)
    for wrong, message in (({"a": weights(1)["a"]}, "does not send b"), ({"x": torch.ones(1)}, "has no tensor x")):
        writer = DeltaWriter(tmp_path / "other", base, "xor", "xxh3-128")
        with pytest.raises(ValueError, match=message):
            writer.write(wrong.items())
        with pytest.raises(RuntimeError, match="start the run again"):
            writer.write(weights(1).items())
    assert not (tmp_path / "other").exists()


def test_a_new_run_starts_from_the_original_again(base: Path, tmp_path: Path) -> None:
    local = LocalCheckpoint(tmp_path / "local", base)
    DeltaWriter(tmp_path / "wire", base, "xor", "xxh3-128").write(weights(4).items())
    local.pull(tmp_path / "wire", 1)
    writer = DeltaWriter(tmp_path / "wire", base, "xor", "xxh3-128")
    writer.clear()
    assert same(read(local.pull(tmp_path / "wire", 0)), weights(0))
    writer.write(weights(2).items())
    assert same(read(local.pull(tmp_path / "wire", 1)), weights(2))


def test_engines_of_one_host_share_the_copy(base: Path, tmp_path: Path) -> None:
    DeltaWriter(tmp_path / "wire", base, "xor", "xxh3-128").write(weights(4).items())
    locals_ = [LocalCheckpoint(tmp_path / "local", base) for _ in range(3)]
    threads = [threading.Thread(target=local.pull, args=(tmp_path / "wire", 1)) for local in locals_]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(read(version_dir(tmp_path / "local", 1)), weights(4))


class ScriptedEngine:
    """Answers at once; patches its copy as the real owner does, and keeps what it loads."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.log, self.weights = args, [], {}  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        return Namespace(remote=lambda *a, **k: self.call(name, *a, **k))

    def call(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.log.append((name, *args, *kwargs.values()))
        if name == "pull_weights":
            SGLangEngine.pull_weights(self, *args)  # type: ignore[arg-type]
        if name == "update_weights_from_disk":
            self.weights = read(Path(args[0]))


def note(args: Namespace, version_dir: str, engines: list[Any]) -> None:
    """A hook for after the files are there."""
    engines[0].log.append(("hook", sorted(path.name for path in Path(version_dir).iterdir())))


def test_the_updater_sends_deltas(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_weight.dist, "barrier", lambda: None)
    args = Namespace(
        hf_checkpoint=str(base), update_weight_mode="delta", update_weight_disk_dir=str(tmp_path / "wire"),
        update_weight_local_checkpoint_dir=str(tmp_path / "local"), update_weight_delta_encoding="xor",
        update_weight_delta_checksum="xxh3-128", custom_update_weight_post_write_path=f"{__name__}.note",
    )  # fmt: skip
    engine = ScriptedEngine(args)
    updater = update_weight.WeightUpdater(args, Namespace(is_main=True))  # type: ignore[arg-type]
    target = update_weight.EngineSet([engine], [1], lambda answers: answers)
    for seed in (0, 3, 5):
        source = update_weight.WeightSource(lambda seed=seed: iter(weights(seed).items()), lambda _: None)
        updater.update(source, target)
        assert same(engine.weights, weights(seed))
    files = ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    reload = ["pause_generation", "flush_cache", "update_weights_from_disk", "continue_generation"]
    assert [entry[0] for entry in engine.log] == ["pull_weights", *(["hook", "pull_weights", *reload] * 3)]
    assert engine.log[1] == ("hook", files) and engine.log[2] == ("pull_weights", 1)
    assert engine.log[5] == ("update_weights_from_disk", str(version_dir(tmp_path / "local", 1)), "1")
