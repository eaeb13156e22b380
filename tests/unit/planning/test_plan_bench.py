"""The planner's benchmark: its job, and the figures that come out."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from blend_core.prefix_tree import build_prefix_tree
from flows.bench.plan import run_plan_bench
from flows.bench.plan_data import write_request_shards
from flows.bench.plan_process import load_request_shards


def test_the_job_is_the_same_for_a_seed_and_of_the_promised_kind(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        folder.mkdir()
        write_request_shards(folder, 12_000, seed)
    first, again, other = map(load_request_shards, folders)
    assert np.array_equal(first.token_ids, again.token_ids)
    assert not np.array_equal(first.token_ids[:1000], other.token_ids[:1000])
    assert first.seq.tolist() == list(range(12_000))
    assert len(first.token_ids) / 12_000 > 500
    assert 0.05 < (first.min_tokens == first.max_tokens).mean() < 0.15
    tree = build_prefix_tree(first, 16)
    tree.check_integrity()
    # Documents make many small nodes below wide ones.
    assert tree.num_nodes > 500
    assert tree.total_shared_tokens > 0.5 * len(first.token_ids)


def test_figures_have_the_promised_names_and_agree() -> None:
    said: list[str] = []
    figures = run_plan_bench(1_000, 0, said.append)
    assert list(asdict(figures)) == [
        "num_requests",
        "num_prompt_tokens",
        "load_s",
        "build_s",
        "transform_s",
        "total_s",
        "peak_rss_bytes",
        "prefix_sharing",
        "sharing_kept",
    ]
    assert figures.num_requests == 1_000
    assert figures.total_s == pytest.approx(figures.build_s + figures.transform_s)
    assert 0.98 <= figures.sharing_kept <= 1
    assert figures.peak_rss_bytes > 4 * figures.num_prompt_tokens
    assert said
