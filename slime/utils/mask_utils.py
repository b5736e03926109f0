"""Token ids and loss mask of a whole conversation, for supervised fine-tuning.

The conversation is rendered once by the tokenizer's chat template and encoded once, so the ids are exactly those of
`apply_chat_template` over all messages. Where an assistant turn begins and ends is read off other renderings of the
same template (of its prefixes), never from constants about system prompts or markers. A turn spans what follows the
generation prompt up to the end of its message, end-of-turn marker included.

Templates that treat old turns differently (Qwen3 drops the reasoning of turns before the last user message) are
handled by rendering a prefix with a later user message behind it, as the turn stands in the full text.
Consecutive tool messages are one group: no boundary inside them is ever asked for.
Cost: about two renderings per assistant turn. Needs a fast tokenizer (character offsets). Leaves out: media.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from functools import cached_property
from typing import Any

_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
_DISTILL_MARKER = "<｜Assistant｜>"
# A text that no template rewrites and that shares no first character with any marker.
_PROBE = "\u241fprobe\u241f"


def get_response_lengths(loss_masks: list[list[int]]) -> list[int]:
    """For each mask, the number of entries from its first 1 to its end; 0 when there is no 1."""
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Renders conversations to ids and 0/1 masks.

    `tokenizer_type` is `qwen`, `qwen3` or `qwen3_5` (one algorithm serves all) or `distill_qwen`, for DeepSeek-R1
    distillations, whose template cuts the reasoning even out of the last turn: that turn is taken verbatim instead.
    `qwen` with a vocabulary that has the DeepSeek marker means `distill_qwen`. Raises ValueError for other types.

    `train_boundary_token`: templates such as GLM's have no end-of-turn marker, and a model stops with the first token of the next
    turn. That token is then trained as well; behind the last turn, where none follows, the one that begins a user turn is added.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen", train_boundary_token: bool = False) -> None:
        if tokenizer_type not in _TYPES:
            raise ValueError(f"loss mask type {tokenizer_type!r}: choose one of {', '.join(_TYPES)}")
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("loss masks need a fast tokenizer (one that gives character offsets)")
        if tokenizer_type == "qwen" and _DISTILL_MARKER in tokenizer.get_vocab():
            tokenizer_type = "distill_qwen"
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self.train_boundary_token = train_boundary_token

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """See the function of the same name."""
        return get_response_lengths(loss_masks)

    def get_loss_mask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids of the whole conversation and a mask of the same length: 1 on assistant turns, 0 elsewhere.

        A message with `step_loss_mask` other than 1 gets 0. Raises ValueError when the template does not keep earlier
        turns in place, so that a turn cannot be found in the full text.
        """
        if self.tokenizer_type == "distill_qwen":
            return self._encode(*self._distill_spans(messages, tools))
        return self._encode(*self._template_spans(messages, tools))

    def _template_spans(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        text = self._render(messages, tools)
        return text, self._turn_spans(text, messages, tools)

    def _encode(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, starts = list(encoded["input_ids"]), [begin for begin, _ in encoded["offset_mapping"]]
        if self.train_boundary_token and spans and spans[-1][1] == len(text):
            user_turn = self._user_text({"role": "user", "content": _PROBE})
            ids.append(self.tokenizer(user_turn, add_special_tokens=False)["input_ids"][0])
            starts.append(len(text))
        mask = [0] * len(starts)
        for begin, end in spans:
            first, last = bisect_left(starts, begin), bisect_left(starts, end)
            last += self.train_boundary_token
            mask[first:last] = [1] * (last - first)
        return ids, mask

    def gen_multi_turn_loss_mask_qwen(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """As `get_loss_mask`, whatever the type of this generator."""
        return self._encode(*self._template_spans(messages, tools))

    # One algorithm reads the turns off any of these templates; the names are those of the public interface.
    gen_multi_turn_loss_mask_qwen3 = gen_multi_turn_loss_mask_qwen
    gen_multi_turn_loss_mask_qwen3_5 = gen_multi_turn_loss_mask_qwen

    def gen_multi_turn_loss_mask_distill_qwen(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """As `get_loss_mask` of a `distill_qwen` generator: the last turn only."""
        return self._encode(*self._distill_spans(messages, tools))

    def get_loss_mask_with_multimodal_alignment(
        self, messages: list[dict[str, Any]], input_ids: list[int], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """`input_ids` (media expanded by the processor) and a mask of their length: zeros, then the text's mask.

        Media stand in prompts, so they only add untrained tokens in front. Raises ValueError when `input_ids` is shorter.
        """
        text_messages = [{**message, "content": _text_of(message["content"])} for message in messages]
        _, mask = self.get_loss_mask(text_messages, tools)
        missing = len(input_ids) - len(mask)
        if missing < 0:
            raise ValueError(f"{len(input_ids)} input ids are fewer than the {len(mask)} tokens of the text alone")
        return list(input_ids), [0] * missing + mask

    def get_system_message_length(self) -> tuple[int, int]:
        """(tokens of the system text the template adds by itself, tokens of the generation prompt)."""
        first = {"role": "user", "content": _PROBE}
        one, two = self._render([first], None), self._render([first, first], None)
        added = two[len(one) :] if two.startswith(one) else self._user_text(first)
        generation = self._generation_headers[0]
        before = one.removesuffix(added)

        def count(text: str) -> int:
            return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        return count(before), count(generation)

    def find_all_sublist_indices(self, main_list: list[Any], sublist: list[Any]) -> list[int]:
        """Where `sublist` begins in `main_list`, every place."""
        size = len(sublist)
        return [i for i in range(len(main_list) - size + 1) if main_list[i : i + size] == sublist]

    def get_text_from_loss_mask(self, token_ids: list[int], loss_masks: list[int]) -> list[str]:
        """Text of every run of 1 in the mask, for looking at what is trained."""
        runs: list[list[int]] = []
        for previous, (token, keep) in zip([0, *loss_masks], zip(token_ids, loss_masks, strict=True), strict=False):
            if keep and not previous:
                runs.append([])
            if keep:
                runs[-1].append(token)
        return [self.tokenizer.decode(run) for run in runs]

    def _render(self, messages: list[dict[str, Any]], tools: Any, generation_prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
        )

    def _distill_spans(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """Text and span when only the last turn is trained, exactly as the model wrote it."""
        last = messages[-1]
        if last["role"] != "assistant":
            raise ValueError(
                f"distill_qwen trains the last message, which must be the assistant's, not {last['role']}'s"
            )
        prompt = self._render(messages[:-1], tools, generation_prompt=True)
        end_marker = self.tokenizer.eos_token or ""
        content = last["content"]
        text = prompt + content + ("" if content.endswith(end_marker) else end_marker)
        return text, [(len(prompt), len(text))] if _is_trained(last) else []

    def _turn_spans(self, text: str, messages: list[dict[str, Any]], tools: Any) -> list[tuple[int, int]]:
        """Character spans of the trained assistant turns in `text`."""
        headers = self._generation_headers
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or not _is_trained(message):
                continue
            begin = self._boundary(text, messages, i, tools)
            # The longest form that stands here: templates may open a reasoning block for new turns only.
            header = max((h for h in headers if text.startswith(h, begin)), key=len, default="")
            spans.append((begin + len(header), self._boundary(text, messages, i + 1, tools)))
        return spans

    @cached_property
    def _generation_headers(self) -> tuple[str, ...]:
        """Forms of the text between a user message and the assistant's first own character."""
        user, answer = {"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}
        base = self._render([user], None)
        generation = self._render([user], None, generation_prompt=True)[len(base) :]
        last_turn = self._render([user, answer], None)[len(base) :]
        old_turn = self._render([user, answer, user], None)[len(base) :]
        return generation, _common_prefix(generation, last_turn), _common_prefix(generation, old_turn)

    def _boundary(self, text: str, messages: list[dict[str, Any]], count: int, tools: Any) -> int:
        """Where the first `count` messages end in `text`, the rendering of all of them."""
        if count == len(messages):
            return len(text)
        if count == 0:
            return max(text.find(self._generation_headers[0]), 0)
        prefix = self._render(messages[:count], tools)
        if text.startswith(prefix):
            return len(prefix)
        later_user = next((m for m in messages[count:] if m["role"] == "user"), None)
        if later_user is not None:
            suffix = self._user_text(later_user)
            longer = self._render([*messages[:count], later_user], tools)
            if longer.endswith(suffix) and text.startswith(longer.removesuffix(suffix)):
                return len(longer) - len(suffix)
        raise ValueError(
            f"the chat template changes the first {count} of {len(messages)} messages when more follow, "
            "so their tokens cannot be told apart; train this conversation turn by turn"
        )

    def _user_text(self, message: dict[str, Any]) -> str:
        """What a user message adds to a conversation."""
        first = {"role": "user", "content": _PROBE}
        both, alone = self._render([first, message], None), self._render([first], None)
        return both[len(os.path.commonprefix([both, alone])) :]


def _text_of(content: Any) -> str:
    """The text parts of a message's content, joined."""
    if not isinstance(content, list):
        return str(content)
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))


def _is_trained(message: dict[str, Any]) -> bool:
    return message.get("step_loss_mask", 1) == 1


def _common_prefix(left: str, right: str) -> str:
    return os.path.commonprefix([left, right])
