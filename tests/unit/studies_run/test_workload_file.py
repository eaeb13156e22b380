"""Anyone's workload comes as a Parquet file; what cannot be is refused with what to do."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blend_core.errors import ConfigurationError
from blend_core.studies.workload import seen_tokens
from blend_core.studies.workload_file import read_workload
from flows.bench.simulate import run_simulate_bench
from flows.bench.study_tasks import study_target


def write(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


ROWS = {
    "num_prompt_tokens": [100, 130, 50],
    "num_output_tokens": [5, 900, 7],
    "prefix_path": [[[7, 64]], [[7, 64], [8, 66]], []],
    "preset": [False, True, False],
}


def test_paths_and_what_is_left_of_a_prompt_become_segments(tmp_path):
    workload = read_workload(write(tmp_path / "night.parquet", **ROWS))
    requests = workload.requests
    assert workload.name == "night"
    assert requests.num_prompt_tokens.tolist() == [100, 130, 50]
    assert requests.segment_tokens.tolist() == [64, 36, 64, 66, 50]
    shared = requests.segment_ids[[0, 2]].tolist()
    assert shared[0] == shared[1]
    assert len(set(requests.segment_ids.tolist())) == 4
    assert requests.min_tokens.tolist() == [0, 900, 0]
    assert requests.max_tokens.tolist() == [1024, 900, 1024]
    assert workload.num_output_tokens.tolist() == [5, 900, 7]


_THREADS_OF_A_READ = """
import sys, pathlib, psutil
from blend_core.studies.workload_file import read_workload
process = psutil.Process()
before = process.num_threads()
read_workload(pathlib.Path(sys.argv[1]))
print(process.num_threads() - before)
"""


def test_reading_leaves_no_thread_that_could_outlive_the_interpreter(tmp_path):
    # One that lets go of a Python object while the interpreter ends aborts the process, behind its error.
    file = write(tmp_path / "night.parquet", **ROWS)
    read = subprocess.run(
        [sys.executable, "-c", _THREADS_OF_A_READ, str(file)], capture_output=True, text=True, check=True
    )
    assert read.stdout.strip() == "0"


def test_a_segment_is_shared_only_behind_the_same_segments(tmp_path):
    paths = [[[1, 64], [3, 64]], [[2, 64], [3, 64]], [[2, 64], [3, 64]]]
    columns = ROWS | {"num_prompt_tokens": [140, 140, 140], "prefix_path": paths}
    requests = read_workload(write(tmp_path / "w.parquet", **columns)).requests
    assert seen_tokens(requests, 16).tolist() == [0, 0, 128]
    assert sorted(requests.shared_with_previous(requests.lexical_order(), 16).tolist()) == [0, 0, 128]


def test_pairs_may_be_structs(tmp_path):
    pairs = [[{"segment": "a", "tokens": 64}], [{"segment": "a", "tokens": 64}], []]
    workload = read_workload(write(tmp_path / "w.parquet", **ROWS | {"prefix_path": pairs}))
    assert workload.requests.segment_tokens.tolist() == [64, 36, 64, 66, 50]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_prompt_tokens": [63, 130, 50]}, "more tokens than its prompt"),
        ({"num_output_tokens": [0, 900, 7]}, "from 1 to"),
        ({"num_output_tokens": [1 << 40, 900, 7]}, "from 1 to"),
        ({"num_output_tokens": [None, 900, 7]}, "null in 1 row;"),
        ({"num_output_tokens": [1.5, 900.0, 7.0]}, "whole numbers"),
        ({"preset": [False, None, True]}, "null in 1 row; make it true or false"),
        ({"preset": ["false", "true", "false"]}, "preset is string; make it true or false"),
        ({"prefix_path": [[7, 64], [7], []]}, "make it lists of pairs"),
        ({"prefix_path": [[], [[7, 64, 1]], []]}, "row 2 has to be a list of pairs"),
        ({"prefix_path": [[[7, None]], [], []]}, "list of pairs"),
        ({"prefix_path": [[[7, 0]], [], []]}, "at least 1"),
        ({"prefix_path": [[None], [], []]}, "list of pairs"),
        ({"prefix_path": [7, 8, 9]}, "prefix_path is int64; make it lists of pairs"),
        ({"prefix_path": [[{"id": True, "tokens": 9}], [], []]}, "id: bool"),
        ({"prefix_path": [[[7, 1]], [[7, 3]], []]}, "has 3 tokens and had 1 before"),
        ({"prefix_path": [[[7, 64]], [[8, 2], [7, 66]], []]}, "row 2 has 66 tokens and had 64 before"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, change, message):
    with pytest.raises(ConfigurationError, match=message):
        read_workload(write(tmp_path / "w.parquet", **ROWS | change))


def test_each_way_not_to_be_a_workload_has_a_sentence_of_its_own(tmp_path):
    path = write(tmp_path / "w.parquet", num_prompt_tokens=[1], num_output_tokens=[1], preset=[True])
    with pytest.raises(ConfigurationError, match="has no column prefix_path; add it: lists of pairs"):
        read_workload(path)
    (tmp_path / "text.parquet").write_text("no table")
    with pytest.raises(ConfigurationError, match="is no Parquet file"):
        read_workload(tmp_path / "text.parquet")
    (tmp_path / "empty.parquet").touch()
    with pytest.raises(ConfigurationError, match="is no Parquet file"):
        read_workload(tmp_path / "empty.parquet")
    for place in (tmp_path / "missing.parquet", tmp_path):
        with pytest.raises(ConfigurationError, match="There is no file"):
            read_workload(place)


def test_text_that_is_not_utf8_is_refused(tmp_path):
    named = [[["QQQQ", 64]], [], []]
    pairs = [[{"id": pair[0], "tokens": pair[1]} for pair in path] for path in named]
    for columns, message in (
        (ROWS | {"prefix_path": pairs}, "night.parquet: a segment id of prefix_path is not UTF-8; make"),
        (ROWS | {"QQQQ": [1, 2, 3]}, "night.parquet has a column whose name is not UTF-8; give"),
    ):
        file = tmp_path / "night.parquet"
        pq.write_table(pa.table(columns), file, compression="none", write_statistics=False)
        file.write_bytes(file.read_bytes().replace(b"QQQQ", b"Q\xff\xfeQ"))
        with pytest.raises(ConfigurationError, match=message):
            read_workload(file)


def test_a_pair_of_two_fields_of_one_name_is_refused(tmp_path):
    pair = pa.struct([("a", pa.int64()), ("a", pa.int64())])
    fields = [pa.array([1, 2, 3]), pa.array([1, 1, 1])]
    pairs = pa.StructArray.from_arrays(fields, fields=list(pair))
    paths = pa.ListArray.from_arrays([0, 1, 2, 3], pairs)
    pq.write_table(pa.table(ROWS | {"prefix_path": paths}), tmp_path / "w.parquet")
    with pytest.raises(ConfigurationError, match="make it lists of pairs"):
        read_workload(tmp_path / "w.parquet")


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    names = ["preset", *ROWS]
    columns = [pa.array(ROWS[name]) for name in names]
    pq.write_table(pa.Table.from_arrays(columns, names=names), tmp_path / "w.parquet")
    with pytest.raises(ConfigurationError, match="has the column preset 2 times"):
        read_workload(tmp_path / "w.parquet")


def test_a_number_out_of_range_is_named_with_its_row(tmp_path):
    path = write(tmp_path / "w.parquet", **ROWS | {"num_output_tokens": [900, -3, 7]})
    with pytest.raises(ConfigurationError, match="num_output_tokens of row 2 is -3; give every row a number"):
        read_workload(path)


def test_an_empty_file_is_refused(tmp_path):
    schema = pa.schema(
        [
            ("num_prompt_tokens", pa.int64()),
            ("num_output_tokens", pa.int64()),
            ("prefix_path", pa.list_(pa.list_(pa.int64()))),
            ("preset", pa.bool_()),
        ]
    )
    pq.write_table(schema.empty_table(), tmp_path / "w.parquet")
    with pytest.raises(ConfigurationError, match="no row"):
        read_workload(tmp_path / "w.parquet")


def test_a_request_that_no_device_of_the_studies_can_hold_is_refused(tmp_path):
    path = write(tmp_path / "w.parquet", **ROWS | {"num_prompt_tokens": [100, 1_000_000, 50]})
    with pytest.raises(ConfigurationError, match="row 2 needs 1,000,899 tokens of KV"):
        run_simulate_bench(path, 0, lambda text: None, study_target())
