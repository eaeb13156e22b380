"""The file of the comparison with vLLM's own batch runner: shared prefixes and long answers, shuffled."""

import json
import random
from itertools import cycle, islice
from pathlib import Path
from typing import Final

from flows.demo import gsm8k_questions, mmlu_shots

SHORT_ANSWER_TOKENS: Final = 2
LONG_ANSWER_TOKENS: Final = 400
LONG_ANSWER_SHARE: Final = 0.06
"""Of the requests: few, since each reads KV for two hundred times as many steps as a short one."""


def write_request_file(path: Path, num_requests: int, seed: int) -> None:
    """Writes MMLU 5-shot questions and GSM8K problems as lines of OpenAI's Batch format.

    Questions are numbered, so that no two prompts are equal however many are asked for: what a subject's
    share are the five examples before. Answers have preset lengths: whoever runs the file does the same work.
    """
    num_long = round(num_requests * LONG_ANSWER_SHARE)
    shots, problems = mmlu_shots(), gsm8k_questions()
    prompts = [
        (f"{examples}({number})\n{question}", SHORT_ANSWER_TOKENS)
        for number, (examples, question) in enumerate(islice(cycle(shots), num_requests - num_long))
    ]
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
