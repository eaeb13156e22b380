"""The options of vLLM that the documentation lists are those that pass."""

import re
from collections import Counter
from pathlib import Path

from blend_core.engines.vllm.passed_options import KNOWN_OPTIONS

DOCUMENT = Path(__file__).parents[3] / "docs/vllm.md"


def test_the_document_lists_each_option_once() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.partition("<!-- vllm-options -->")[2].partition("<!-- /vllm-options -->")[0]
    assert Counter(re.findall(r"`(\w+)`", table)) == Counter(KNOWN_OPTIONS.keys())
