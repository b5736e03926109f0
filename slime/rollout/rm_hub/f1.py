"""Token F1 of short answers, as in SQuAD and HotpotQA evaluation.

Input: predicted and true answer text. Left out: several reference answers.
"""

from __future__ import annotations

import re
import string
from collections import Counter

_CLOSED_ANSWERS = {"yes", "no", "noanswer"}
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(s: str) -> str:
    """Lower case, without punctuation and English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_PUNCTUATION)).split())


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """(F1, precision, recall) over normalised words; a closed answer (yes, no) that differs scores zero."""
    if prediction is None:
        return 0.0, 0.0, 0.0
    predicted, true = normalize_answer(prediction), normalize_answer(str(ground_truth))
    if predicted != true and not _CLOSED_ANSWERS.isdisjoint((predicted, true)):
        return 0.0, 0.0, 0.0
    predicted_words, true_words = predicted.split(), true.split()
    common = sum((Counter(predicted_words) & Counter(true_words)).values())
    if common == 0:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(predicted_words), common / len(true_words)
    return 2 * precision * recall / (precision + recall), precision, recall
