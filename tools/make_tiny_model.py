"""Make a tiny Qwen2-architecture model with its own byte-level BPE tokenizer, in Hugging Face format; deterministic for a seed.

    python tools/make_tiny_model.py --world-dir outputs/world --output outputs/tiny_model [--method agentflow] [--seed 0]

Writes the method's tiny world (`sft.jsonl`, `train.jsonl`, `heldout.jsonl` and what else it has) under --world-dir and the
randomly initialised model under --output. The tokenizer is trained under the pre-tokenizer that transformers puts into every `qwen2` folder, and
the saved tokenizer is checked against the trained one: an id that changed on the way through disk would be silent poison.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, trainers
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# What differs from `make_model`'s defaults. Positions turn slowly where a name must be found a hundred tokens back.
SHAPES: dict[str, dict[str, Any]] = {
    "agentflow": {},
    "memagent": {"layers": 3, "rope_theta": 1e6},
    "toolorchestra": {},
}
END, START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BPE_VOCABULARY = 640
# Enough for every word of a world whose words cannot be added tokens, as these are broken up in what users and tools say.
BPE_VOCABULARY_OF_WORDS = 1600
CONTEXT_LENGTH = 1024
# Sizes in `start_with_lookup`: of the biases that look back, of the codes written, of the codes compared, of what is copied.
LOOK_BACK, WRITE_CODE, MATCH, COPY = 7.0, 0.2, 2.0, 0.5
SLOW = 0.006


def train_tokenizer(texts: list[str], whole_pieces: list[str], vocabulary: int = BPE_VOCABULARY) -> Qwen2Tokenizer:
    """Train a BPE of at most `vocabulary` tokens on `texts` and keep `whole_pieces` as single tokens."""
    blank = Qwen2Tokenizer().backend_tokenizer
    core = Tokenizer(models.BPE())
    core.normalizer, core.pre_tokenizer, core.decoder = blank.normalizer, blank.pre_tokenizer, blank.decoder
    alphabet = sorted(_byte_alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    bpe = json.loads(core.to_str())["model"]
    tokenizer = Qwen2Tokenizer(vocab=bpe["vocab"], merges=[tuple(pair) for pair in bpe["merges"]], eos_token=TURN_END)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in (START, TURN_END)])
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in whole_pieces])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = CONTEXT_LENGTH
    return tokenizer


def _byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def make_model(
    vocabulary: int, end_id: int, pad_id: int, seed: int, layers: int = 2, rope_theta: float = 1e4
) -> Qwen2ForCausalLM:
    """About half a million parameters in fp32: hidden 128, 4 heads over 2 key-value heads, tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=-(-vocabulary // 8) * 8,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        initializer_range=0.05,  # twice the usual: at this width copying forms several times sooner
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = end_id
    return model


@torch.no_grad()
def start_with_lookup(model: Qwen2ForCausalLM, seed: int) -> None:
    """Arrange the random weights so that the model begins with a rough look-up: after "NAME x" it leans to what followed before.

    Layer 0 gets two heads that look one and two tokens back and write a random code of what they see to places of their
    own; layer 1 looks for tokens whose code of two back is its own code of one back, and copies them. Found by gradient
    descent alone, this takes a model of this size millions of tokens; arranged, it only has to be refined.
    """
    attention, width = [layer.self_attn for layer in model.model.layers[:2]], model.config.hidden_size
    size = width // model.config.num_attention_heads
    random = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:  # what is written at random would drown the codes
        layer.mlp.down_proj.weight *= 0.2
        layer.self_attn.o_proj.weight *= 0.2
    attention[0].q_proj.weight *= 0.2
    attention[0].k_proj.weight *= 0.2
    places = torch.linalg.qr(torch.randn(width, 2 * size, generator=random))[0].split(size, dim=1)
    attention[0].v_proj.weight[:size] = torch.randn(size, width, generator=random) / width**0.5
    one = torch.ones(size // 2)
    slow = (model.model.rotary_emb.inv_freq < SLOW).repeat(2)  # the others turn too far over the length of a prompt
    attention[0].k_proj.bias[:size] = LOOK_BACK * torch.cat([one, 0 * one])
    for head, place in enumerate(places):
        angle = (head + 1) * model.model.rotary_emb.inv_freq
        rows = slice(head * size, (head + 1) * size)
        attention[0].q_proj.bias[rows] = LOOK_BACK * torch.cat([angle.cos(), -angle.sin()])
        attention[0].o_proj.weight[:, rows] = WRITE_CODE * place
        attention[1].q_proj.weight[rows][slow] = MATCH * places[0].T[slow]
    attention[1].k_proj.weight[:size][slow] = MATCH * places[1].T[slow]
    copied = torch.randn(2, size, width, generator=random) / width**0.5
    attention[1].v_proj.weight.copy_(copied.flatten(0, 1))
    heads = copied.repeat_interleave(2, dim=0).flatten(0, 1)
    attention[1].o_proj.weight.copy_(COPY * heads.T)


def check_saved_tokenizer(folder: Path, trained: Qwen2Tokenizer, texts: list[str]) -> None:
    """Raise RuntimeError when the tokenizer read back from `folder` gives other ids or loses text."""
    saved = AutoTokenizer.from_pretrained(folder)
    for text in texts:
        ids = trained.encode(text, add_special_tokens=False)
        if saved.encode(text, add_special_tokens=False) != ids or saved.decode(ids) != text:
            raise RuntimeError(f"the saved tokenizer in {folder} disagrees with the trained one on {text!r}")


def further_models(method: str) -> list[str]:
    """Models that the quickstart makes beside the warm start, on chat rows of their own."""
    return list(importlib.import_module(f"agentic.{method}.quickstart").FURTHER_MODELS)


def chat_texts(path: Path) -> list[str]:
    return [message["content"] for line in path.open() for message in json.loads(line)["prompt"]]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and the tokenizer")
    parser.add_argument(
        "--world-dir", type=Path, required=True, help="folder for sft.jsonl, train.jsonl and heldout.jsonl"
    )
    parser.add_argument("--method", choices=SHAPES, default="agentflow", help="whose world and vocabulary")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n-sft", type=int, help="problems that become warm-start traces (default: the world's)")
    parser.add_argument("--n-train", type=int, help="problems for reinforcement learning (default: the world's)")
    parser.add_argument("--n-heldout", type=int, help="problems for evaluation only (default: the world's)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    tiny_world = importlib.import_module(f"agentic.{args.method}.tiny_world")
    sizes = {name: vars(args)[name] for name in ("n_sft", "n_train", "n_heldout") if vars(args)[name] is not None}
    paths = tiny_world.write_world(args.world_dir, args.seed, **sizes)
    texts = [text for name in ("sft", *further_models(args.method)) for text in chat_texts(paths[name])]
    vocabulary = BPE_VOCABULARY_OF_WORDS if args.method == "toolorchestra" else BPE_VOCABULARY
    speakers = ["system", "user", "assistant", *(["tool"] if args.method == "toolorchestra" else [])]
    tokenizer = train_tokenizer(texts + speakers, tiny_world.added_tokens(), vocabulary)
    shape = SHAPES[args.method]
    model = make_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, args.seed, **shape)
    if args.method == "memagent":
        start_with_lookup(model, args.seed)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    check_saved_tokenizer(args.output, tokenizer, texts[:500])
    print(f"{args.output}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens; world in {args.world_dir}")


if __name__ == "__main__":
    main()
