"""The benchmark's reading process, on few lines."""

from pathlib import Path

import pytest

from flows.bench.ingest import run_ingest_bench
from flows.settings import Settings
from flows.wiring import Endpoints, Wiring
from storage.object_client import ObjectStoreOptions

pytestmark = [pytest.mark.s3, pytest.mark.slow]


def test_figures_are_those_of_the_lines(
    object_store_options: ObjectStoreOptions,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wiring = Wiring.from_settings(
        Settings(home=tmp_path),
        Endpoints(
            database_url="postgresql://127.0.0.1:9/none",
            s3_endpoint_url=object_store_options.endpoint_url,
            s3_bucket=object_store_options.bucket,
            s3_access_key=object_store_options.access_key,
            s3_secret_key=object_store_options.secret_key,
            s3_region=object_store_options.region,
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
