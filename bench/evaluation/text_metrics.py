"""Scores of free text against a reference, without a judge: ROUGE-L and BLEU-4."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

_MAX_ORDER = 4


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def rouge_l(text: str, reference: str) -> float:
    """Returns the F1 of the longest common subsequence of words (Lin, 2004); 0 when either is empty."""
    own, theirs = words(text), words(reference)
    common = _common_subsequence_len(own, theirs)
    return 2 * common / (len(own) + len(theirs)) if common else 0.0


def bleu_4(text: str, reference: str) -> float:
    """Returns BLEU up to 4-grams with a brevity penalty (Papineni et al., 2002).

    One is added to counts above single words (Lin and Och, 2004), so that short texts are not all 0.
    """
    own, theirs = words(text), words(reference)
    if not own or not theirs:
        return 0.0
    precisions = [_precision(own, theirs, order) for order in range(1, _MAX_ORDER + 1)]
    if not all(precisions):
        return 0.0
    brevity = min(0.0, 1 - len(theirs) / len(own))
    return math.exp(brevity + sum(map(math.log, precisions)) / _MAX_ORDER)


def _precision(own: Sequence[str], theirs: Sequence[str], order: int) -> float:
    mine, wanted = _ngrams(own, order), _ngrams(theirs, order)
    added = int(order > 1)
    total = sum(mine.values()) + added
    return (sum((mine & wanted).values()) + added) / total if total else 0.0


def _ngrams(of: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(of[start : start + order]) for start in range(len(of) - order + 1))


def _common_subsequence_len(one: Sequence[str], other: Sequence[str]) -> int:
    lengths = [0] * (len(other) + 1)
    for left in one:
        before = 0
        for place, right in enumerate(other, start=1):
            longest = before + 1 if left == right else max(lengths[place], lengths[place - 1])
            before, lengths[place] = lengths[place], longest
    return lengths[-1]
