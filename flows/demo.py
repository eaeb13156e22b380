"""The demo: one mixed batch on a small model, from S3 objects and a Postgres table, with six broken lines."""

import json
import random
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import sqlalchemy

from flows.job_parts import JobOptions, SqlSource
from flows.job_spec import BatchJobSpec
from storage.database import Database
from storage.objects import ObjectStore

DEMO_MODEL = "smollm2-135m"
DEMO_PREFIX = "demo/requests/"

_CREATE_TICKETS = """
    CREATE TABLE IF NOT EXISTS demo_ticket (id int PRIMARY KEY, channel text NOT NULL, body text NOT NULL)
"""
_INSERT_TICKET = """
    INSERT INTO demo_ticket (id, channel, body) VALUES (:id, :channel, :body) ON CONFLICT (id) DO NOTHING
"""


@dataclass(frozen=True, slots=True)
class DemoSize:
    """How many requests of a kind, and how long their answers may be.

    The defaults take about two and a half minutes on two CPU cores that other work keeps busy, too.
    """

    num_gsm8k: int = 12
    gsm8k_max_tokens: int = 80
    reply_max_tokens: int = 48


def demo_lines(size: DemoSize, seed: int = 0) -> list[bytes]:
    """Request lines in OpenAI Batch format, shuffled by `seed` as real files are.

    MMLU 5-shot has long shared prefixes and one-letter answers, GSM8K short prompts and long answers; six
    lines are broken.
    """
    requests = [*_mmlu_requests(), *_gsm8k_requests(size)]
    lines = [json.dumps(request, ensure_ascii=False).encode() for request in requests]
    random.Random(seed).shuffle(lines)
    # The repeated id comes last, since only what comes after the original is a duplicate.
    *others, repeated = broken_lines(json.loads(lines[0]))
    for number, line in enumerate(others, start=1):
        lines.insert(number * 40, line)
    lines.append(repeated)
    return lines


def broken_lines(example: dict[str, Any]) -> list[bytes]:
    """Six lines, each broken in another way; the last repeats the good request `example`."""
    question = {"role": "user", "content": "Name a colour."}
    bodies: list[dict[str, Any]] = [
        {"custom_id": "broken-n", "body": {"messages": [question], "n": 3, "max_tokens": 8}},
        {"custom_id": "broken-max-tokens", "body": {"messages": [question], "max_tokens": -1}},
        {"custom_id": "broken-no-prompt", "body": {"messages": [], "max_tokens": 8}},
    ]
    call = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [json.dumps(call | part | {"body": {"model": DEMO_MODEL, **part["body"]}}) for part in bodies]
    embeddings = {
        "custom_id": "broken-embeddings",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": DEMO_MODEL, "input": "a colour"},
    }
    return [
        b'{"custom_id": "broken-cut", "method": "POST", "url": "/v1/chat/comple',
        json.dumps(embeddings).encode(),
        *(line.encode() for line in lines),
        json.dumps(example).encode(),
    ]


def prepare_demo(database: Database, objects: ObjectStore, size: DemoSize) -> BatchJobSpec:
    """Uploads the request file, creates the table of tickets, and returns the job over both. Idempotent."""
    objects.ensure_bucket()
    objects.put(f"{DEMO_PREFIX}mixed.jsonl", b"\n".join(demo_lines(size)) + b"\n")
    _create_tickets(database)
    return demo_job(objects.uri(DEMO_PREFIX), size)


def demo_job(s3_uri: str, size: DemoSize) -> BatchJobSpec:
    """The demo's job: the S3 objects, and two questions about every ticket of the table."""
    title = SqlSource(
        query="SELECT 'title-' || id AS id, channel, body FROM demo_ticket ORDER BY demo_ticket.id",
        system="You give short titles to the mail of a shop.",
        prompt="A customer wrote by {{ channel }}:\n\n{{ body }}\n\nWrite a title of a few words.",
        max_tokens=12,
    )
    reply = SqlSource(
        query=(
            "SELECT 'reply-' || id AS id, body FROM demo_ticket "
            "WHERE channel = 'email' ORDER BY demo_ticket.id"
        ),
        system="You are the customer service of a shop. Answer in two or three friendly sentences.",
        prompt="{{ body }}",
        max_tokens=size.reply_max_tokens,
    )
    return BatchJobSpec(name="demo", model=DEMO_MODEL, s3=[s3_uri], sql=[title, reply], options=JobOptions())


def mmlu_prompts() -> list[str]:
    """5-shot questions of eight subjects: those of a subject share a long prefix."""
    return [examples + question for examples, question in mmlu_shots()]


def mmlu_shots() -> list[tuple[str, str]]:
    """The same, the five examples and the question apart."""
    return [(part["examples"], question) for part in _read("mmlu.json") for question in part["questions"]]


def gsm8k_questions() -> list[str]:
    """Word problems that take several steps."""
    return list(_read("gsm8k.json"))


def _mmlu_requests() -> list[dict[str, Any]]:
    options = {"model": DEMO_MODEL, "max_tokens": 2, "temperature": 0, "stop": "\n"}
    return [
        {
            "custom_id": f"mmlu-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": prompt, **options},
        }
        for number, prompt in enumerate(mmlu_prompts())
    ]


def _gsm8k_requests(size: DemoSize) -> list[dict[str, Any]]:
    system = {"role": "system", "content": "Solve the problem step by step. End with the answer as a number."}
    options = {"model": DEMO_MODEL, "max_tokens": size.gsm8k_max_tokens, "temperature": 0}
    return [
        {
            "custom_id": f"gsm8k-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [system, {"role": "user", "content": question}], **options},
        }
        for number, question in enumerate(gsm8k_questions()[: size.num_gsm8k])
    ]


def _create_tickets(database: Database) -> None:
    with database.connect() as connection:
        connection.execute(sqlalchemy.text(_CREATE_TICKETS))
        connection.execute(sqlalchemy.text(_INSERT_TICKET), _read("tickets.json"))


def _read(name: str) -> Any:
    return json.loads(files("flows.demo_data").joinpath(name).read_text(encoding="utf-8"))
