"""The file of the comparison with vLLM's own batch runner: shared prefixes and long answers, shuffled."""

import json
import random
from itertools import cycle, islice, permutations
from pathlib import Path
from typing import Final

from flows.demo import gsm8k_questions, mmlu_shots

SHORT_ANSWER_TOKENS: Final = 2
LONG_ANSWER_TOKENS: Final = 200
LONG_ANSWER_SHARE: Final = 0.06
"""Of the requests: few, since each reads KV for a hundred times as many steps as a short one."""


ORDERS_PER_SUBJECT: Final = 7
"""Prefixes that the questions of a subject share: with eight subjects nearly as many as all of MMLU has."""


def write_request_file(path: Path, num_requests: int, seed: int) -> None:
    """Writes MMLU 5-shot questions and GSM8K problems as lines of OpenAI's Batch format.

    Requests are numbered, so that no two prompts are equal however many are asked for: what some share are
    the five examples before. Answers have preset lengths: whoever runs the file does the same work.
    """
    num_long = round(num_requests * LONG_ANSWER_SHARE)
    prefixes, problems = _prefixes(), gsm8k_questions()
    prompts = []
    for number in range(num_requests - num_long):
        turn, place = divmod(number, len(prefixes))
        examples, questions = prefixes[place]
        question = questions[turn % len(questions)]
        prompts.append((f"{examples}({number})\n{question}", SHORT_ANSWER_TOKENS))
    prompts += [
        (f"({number}) {problem}", LONG_ANSWER_TOKENS)
        for number, problem in enumerate(islice(cycle(problems), num_long))
    ]
    random.Random(seed).shuffle(prompts)
    lines = [
        json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": num_tokens,
                    "min_tokens": num_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                },
            }
        )
        for number, (prompt, num_tokens) in enumerate(prompts)
    ]
    path.write_text("\n".join(lines) + "\n")


def _prefixes() -> list[tuple[str, list[str]]]:
    """Five examples and the questions of their subject, each subject with its examples in several orders."""
    subjects: dict[str, list[str]] = {}
    for examples, question in mmlu_shots():
        subjects.setdefault(examples, []).append(question)
    prefixes = []
    for examples, questions in subjects.items():
        head, *shots = examples.strip().split("\n\n")
        for order in random.Random(0).sample(list(permutations(shots)), ORDERS_PER_SUBJECT):
            prefixes.append(("\n\n".join((head, *order, "")), questions))
    return prefixes
