"""The benchmark's reading process, on few lines."""

from pathlib import Path

import pytest

from flows.bench.ingest import run_ingest_bench
from flows.settings import Settings
from flows.wiring import Endpoints, Wiring
from infra.state import StackState

pytestmark = [pytest.mark.s3, pytest.mark.slow]


def test_figures_are_those_of_the_lines(
    ingest_stack: StackState, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wiring = Wiring.from_settings(
        Settings(home=tmp_path),
        Endpoints(
            database_url=ingest_stack.database_url,
            s3_endpoint_url=ingest_stack.s3_endpoint_url,
            s3_bucket=ingest_stack.s3_bucket,
            s3_access_key=ingest_stack.s3_access_key,
            s3_secret_key=ingest_stack.s3_secret_key,
            s3_region=ingest_stack.s3_region,
        ),
    )
    monkeypatch.setattr("flows.bench.ingest.MODEL", str(model_folder))
    figures = run_ingest_bench(wiring, 5_000, lambda line: None)
    assert figures.num_requests == 5_000
    assert figures.bytes >= 5_000 * 1_000
    assert figures.bytes_per_s / figures.requests_per_s == pytest.approx(figures.bytes / 5_000)
    assert figures.tokens_per_s > 0
    assert 20e6 < figures.peak_rss_bytes < 500e6
    assert wiring.objects.keys("bench/") == []
    wiring.close()
