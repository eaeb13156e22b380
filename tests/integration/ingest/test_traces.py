"""Public request files, reconciled line by line: each line is a request or an error row of the right code."""

import gzip
import os
from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa

from blend_core.tokenizing import Tokenizer
from flows.ingest.ingest import ingest
from flows.ingest.parse import ParseOptions
from flows.ingest.sources import read_sources
from flows.job_spec import BatchJobSpec
from storage.database import Database
from storage.jobs import create_job
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.request_shard_writer import RequestShardWriter
from storage.request_shards import open_request_shards
from storage.requests import RequestWriter
from storage.schema import request, result

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]

TRACES = Path(os.environ.get("BLEND_TRACES", Path(__file__).parents[4] / "shared" / "traces")) / "batch_jsonl"

# What is at fault in each file; every other line is good.
FAULTS: dict[str, dict[str, int]] = {
    "01_chat_minimal_trailing_blank.jsonl": {},
    "02_identical_bodies_no_eof_newline.jsonl": {},
    "03_chat_varied_params.jsonl": {},
    "04_long_system_prompt_uuid_ids.jsonl": {},
    "06_vision_base64_filename_ids.jsonl": {"unsupported_value": 6},
    "07_vision_url_v4_path.jsonl": {"unsupported_endpoint": 4},
    "08_embeddings_string_list_tokens.jsonl": {"embeddings_not_supported": 12},
    "09_mixed_endpoints_and_models.jsonl": {"embeddings_not_supported": 3, "unsupported_value": 3},
    "10_duplicate_custom_ids.jsonl": {},
    "13_completions_prompt_forms.jsonl": {
        "unsupported_value": 2,
        "empty_prompt": 1,
        "invalid_max_tokens": 1,
        "token_out_of_vocabulary": 1,
    },
    "15_tools_schema_multiturn.jsonl": {"unsupported_value": 4, "unsupported_field": 4},
    "18_mmlu_5shot_1710.jsonl.gz": {},
    "19_gsm8k_chat_1319.jsonl.gz": {},
    "20_mixed_score_generate_reason.jsonl.gz": {},
}


@pytest.fixture(scope="module")
def files() -> list[Path]:
    if not TRACES.is_dir():
        pytest.skip(f"no request files in {TRACES}; set BLEND_TRACES to the folder of traces")
    return sorted(TRACES.iterdir())


def test_no_file_is_left_out(files: list[Path]) -> None:
    assert [path.name for path in files] == sorted(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_reconciles(
    name: str, files: list[Path], db: Database, objects: ObjectStore, model_folder: Path
) -> None:
    data = (TRACES / name).read_bytes()
    entry = objects.put(f"traces/{name}", data)
    job_id = create_job(db, name=name, model="tiny", spec={})
    spec = BatchJobSpec(s3=[entry.uri])
    counts = ingest(
        read_sources(spec, objects, {}, ParseOptions("tiny", keeps_schemas=False)),
        Tokenizer(model_folder),
        RequestWriter(db, job_id),
        RequestShardWriter(objects, Run("run", job_id, 1)),
        max_model_len=100_000,
    )
    text = gzip.decompress(data) if name.endswith(".gz") else data
    numbers = [number for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]
    query = (
        sa.select(request.c.seq, request.c.source_line, request.c.custom_id, result.c.error_code)
        .outerjoin(result, sa.and_(result.c.job_id == request.c.job_id, result.c.seq == request.c.seq))
        .where(request.c.job_id == job_id)
        .order_by(request.c.seq)
    )
    with db.connect() as connection:
        rows = list(connection.execute(query))
    assert [row.seq for row in rows] == list(range(len(numbers)))
    assert [row.source_line for row in rows] == numbers
    codes = Counter(row.error_code for row in rows if row.error_code is not None)
    assert codes == dict(counts.errors_by_code)
    assert codes == {**FAULTS[name], **_repetitions([row.custom_id for row in rows])}
    with open_request_shards(db, objects, job_id) as shards:
        assert len(shards) == counts.total - counts.errored == len(rows) - codes.total()


def _repetitions(custom_ids: list[str | None]) -> dict[str, int]:
    num_repeated = len(custom_ids) - len(set(custom_ids))
    return {"duplicate_custom_id": num_repeated} if num_repeated else {}
