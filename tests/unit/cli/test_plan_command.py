"""`blend plan` on files, without services."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blend_core.specs import load_device_profile, save_device_profile
from flows.dry_run.forecast import FORECAST_POLICIES
from tests.tiny_llama import make_tiny_llama

BEGINNING = "A long common beginning. " * 40
ON_A100 = ("--model", "llama-3.1-8b", "--device", "a100-80g")


def chat(custom_id: str, text: str, **body: object) -> bytes:
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": text}], **body},
        }
    ).encode()


def mixed_lines(num_lines: int) -> list[bytes]:
    """Half of them long and alike with a short answer, half of them short with a long one."""
    return [
        chat(str(number), f"{BEGINNING}{number}", max_tokens=4)
        if number % 2
        else chat(str(number), f"Tell a story about {number}.", max_tokens=400)
        for number in range(num_lines)
    ]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write_lines(*lines: bytes, name: str = "requests.jsonl") -> str:
        path = tmp_path / name
        content = b"\n".join(lines) + b"\n"
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return write_lines


@pytest.fixture
def planned(blend: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """The object that `blend plan ARGUMENTS --json` prints."""

    def plan(*arguments: str) -> dict[str, Any]:
        ran = blend("plan", *arguments, "--json")
        assert ran.status == 0, ran.stderr
        told: dict[str, Any] = json.loads(ran.stdout)
        return told

    return plan


def test_kv_holds_as_many_tokens_as_the_element_type_of_vllms_options_leaves(
    write: Callable[..., str],
    planned: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLEND_ENGINE__NAME", "vllm")
    source, model = write(*mixed_lines(4)), str(make_tiny_llama(tmp_path / "tiny"))
    num_tokens = {}
    for dtype in ("auto", "half", "float"):
        monkeypatch.setenv("BLEND_ENGINE__VLLM__DTYPE", dtype)
        num_tokens[dtype] = planned(source, "--model", model)["num_kv_tokens"]
    assert num_tokens["auto"] == num_tokens["half"] == 2 * num_tokens["float"]


def test_a_plan_tells_sharing_and_duration_under_each_policy(
    planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    lines = [chat(str(number), f"{BEGINNING}{number % 2} {number}", max_tokens=4) for number in range(12)]
    told = planned(write(*lines, b"nope"), *ON_A100)
    assert told["invalid"] == 1
    assert not told["counted_with_tokenizer"]
    assert told["summary"]["num_requests"] == 12
    assert told["summary"]["prefix_sharing_best"] > 0.8
    assert [entry["policy"] for entry in told["policies"]] == list(FORECAST_POLICIES)
    assert all(entry["estimated_duration_s"] > 0 for entry in told["policies"])
    assert told["estimated_duration_s"] == told["policies"][0]["estimated_duration_s"]
    assert (told["engine"], told["tensor_parallel"], told["deadline"]) == ("sequential", 1, None)
    assert not told["is_sample"]


def test_the_terminal_shows_assumption_engine_policies_and_bars(
    blend: Callable[..., Any], write: Callable[..., str]
) -> None:
    ran = blend("plan", write(*mixed_lines(60)), *ON_A100)
    assert ran.status == 0
    assert "answers have any length up to their max_tokens" in ran.stdout
    assert "--expected-output-tokens" in ran.stdout
    assert "sequential, llama-3.1-8b on a100-80g" in ran.stdout
    assert "practical optimum" in ran.stdout
    for policy in FORECAST_POLICIES:
        assert f"\n{policy} " in ran.stdout
    assert "█" in ran.stdout
    assert max(len(line) for line in ran.stdout.splitlines()) < 140


def test_an_optimum_that_is_longer_than_the_run_is_explained(
    blend: Callable[..., Any], write: Callable[..., str]
) -> None:
    # Both first tokens come with the prompts, and the optimum counts a step for each.
    lines = [chat(name, name * 256, max_tokens=1) for name in "ab"]
    assert "a target and no bound" in blend("plan", write(*lines), *ON_A100, "--engine", "overlap").stdout
    assert "no bound" not in blend("plan", write(*mixed_lines(20)), *ON_A100).stdout


def test_an_optimum_that_only_a_sample_comes_in_under_is_not_explained(
    blend: Callable[..., Any], planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    lines = [chat(str(number), f"{number:05} " * 40, max_tokens=1) for number in range(5_200)]
    arguments = (write(*lines), *ON_A100, "--engine", "overlap", "--quick")
    told = planned(*arguments)
    assert max(entry["fraction_of_optimum"] for entry in told["policies"]) > 1
    assert "no bound" not in blend("plan", *arguments).stdout


def test_a_gzip_file_gives_the_same_plan(
    planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    plain = planned(write(*mixed_lines(40)), *ON_A100)
    packed = planned(write(*mixed_lines(40), name="requests.jsonl.gz"), *ON_A100)
    assert plain | {"source": None} == packed | {"source": None}


def test_bins_of_density_count_every_request(
    planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    bins = planned(write(*mixed_lines(40)), *ON_A100)["density_histogram"]
    assert sum(entry["num_requests"] for entry in bins) == 40
    assert bins[-1]["high"] is None, "JSON has no infinity"
    short_answers = sum(entry["num_requests"] for entry in bins if entry["low"] >= 16)
    assert short_answers == 20


def test_a_known_mean_takes_the_place_of_the_bounds(
    planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    file = write(*mixed_lines(40))
    assumed = planned(file, *ON_A100)
    better = planned(file, *ON_A100, "--expected-output-tokens", "20")
    assert assumed["output_lengths"]["basis"] == "max_tokens"
    assert better["output_lengths"]["basis"] == "expected"
    assert "20 tokens" in better["output_lengths"]["assumption"]
    assert better["summary"]["estimated_output_tokens"] == 20 * 20 + 20 * 4
    assert better["estimated_duration_s"] < assumed["estimated_duration_s"] / 2


def test_the_mean_is_told_that_the_bounds_leave_of_the_expected_one(
    planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    file = write(*[chat(str(number), f"Say {number}.", max_tokens=10) for number in range(5)])
    cut = planned(file, *ON_A100, "--expected-output-tokens", "500")["output_lengths"]["assumption"]
    assert cut.endswith(
        "500 tokens in the mean, and none more than its max_tokens: 10 in the mean within these bounds"
    )
    raised = [chat(str(number), f"Say {number}.", max_tokens=50, min_tokens=40) for number in range(5)]
    longer = planned(write(*raised), *ON_A100, "--expected-output-tokens", "20")
    assert longer["output_lengths"]["assumption"].endswith("40 in the mean within these bounds")


def test_the_chance_of_the_lengths_that_are_drawn_makes_no_other_mean(
    planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    # A few lengths drawn around 100 have another mean, which no bound has made.
    file = write(*[chat(str(number), f"Say {number}.", max_tokens=300) for number in range(40)])
    told = planned(file, *ON_A100, "--expected-output-tokens", "100")["output_lengths"]["assumption"]
    assert told == "answers have 100 tokens in the mean, and none more than its max_tokens"


def test_fixed_lengths_are_no_assumption(
    planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    lines = [chat(str(number), f"Say {number}.", max_tokens=50, min_tokens=50) for number in range(5)]
    told = planned(write(*lines), *ON_A100)
    assert told["output_lengths"]["num_preset"] == 5
    assert "fixed by its request" in told["output_lengths"]["assumption"]
    assert told["summary"]["estimated_output_tokens"] == 250


def test_an_overlap_engine_is_simulated_when_asked_for(
    planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    file = write(*mixed_lines(200))
    in_sequence = planned(file, *ON_A100)
    overlapped = planned(file, *ON_A100, "--engine", "overlap")
    assert overlapped["engine"] == "overlap"
    assert overlapped["estimated_duration_s"] < in_sequence["estimated_duration_s"]
    assert overlapped["optimum_s"] == in_sequence["optimum_s"]


def test_a_deadline_tells_the_number_of_devices(
    blend: Callable[..., Any], planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    file = write(*mixed_lines(300))
    enough = planned(file, *ON_A100, "--deadline", "6h")["deadline"]
    assert (enough["num_replicas"], enough["num_devices"]) == (1, 1)
    assert "1 device (1 replica) for 6 h 00 min" in blend("plan", file, *ON_A100, "--deadline", "6h").stdout

    never = planned(file, *ON_A100, "--deadline", "0.5s")["deadline"]
    assert never["num_replicas"] is None
    assert never["max_num_replicas"] == 64
    assert never["estimated_duration_s"] > 0.5
    text = blend("plan", file, *ON_A100, "--deadline", "0.5s").stdout
    assert "no number of replicas up to 64" in text


def test_a_model_that_one_device_does_not_hold_is_planned_on_several(
    blend: Callable[..., Any], planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    arguments = (write(*mixed_lines(40)), "--model", "llama-3.1-70b", "--device", "a100-80g")
    told = planned(*arguments, "--deadline", "1h")
    assert (told["tensor_parallel"], told["device"]) == (4, "a100-80g-x4")
    assert told["deadline"]["num_devices"] == 4
    assert "tensor parallelism" in blend("plan", *arguments).stdout


def test_a_folder_with_nothing_but_a_configuration_can_be_planned_for(
    planned: Callable[..., dict[str, Any]], write: Callable[..., str], tmp_path: Path
) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    told = planned(write(*mixed_lines(10)), "--model", str(folder), "--device", "l4")
    assert told["model"] == "tiny-llama"
    assert not told["counted_with_tokenizer"]


def test_of_a_large_file_a_sample_is_simulated_and_said_so(
    blend: Callable[..., Any], planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    file = write(*mixed_lines(5_200))
    told = planned(file, *ON_A100, "--quick")
    assert told["is_sample"]
    assert told["num_simulated"] < 5_200 == told["summary"]["num_requests"]
    whole = planned(file, *ON_A100)
    assert not whole["is_sample"]
    assert told["estimated_duration_s"] == pytest.approx(whole["estimated_duration_s"], rel=0.2)
    shown = blend("plan", file, *ON_A100, "--quick").stdout
    assert "of 5,200 requests were simulated" in shown
    assert "policies within a few percent of one another are not ranked by that" in shown
    table = [line.split() for line in shown.splitlines() if line.startswith(FORECAST_POLICIES)]
    assert [row[-2:] for row in table] == [["-", "-"]] * len(FORECAST_POLICIES)


def test_requests_that_a_job_refuses_are_counted_and_not_planned(
    blend: Callable[..., Any], planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    on_l4 = ("--model", "llama-3.1-8b", "--device", "l4")
    large = [chat(f"large {number}", f"Tell {number}.", max_tokens=60_000) for number in range(3)]
    file = write(*mixed_lines(20), *large)
    told = planned(file, *on_l4)
    assert (told["num_refused"], told["invalid"], told["summary"]["num_requests"]) == (3, 0, 20)
    alone = planned(write(*mixed_lines(20), name="alone.jsonl"), *on_l4)
    assert told | {"source": "", "num_refused": 0} == alone | {"source": ""}
    assert (
        "3 requests need more KV for prompt and max_tokens than there is; a job refuses them"
        in blend("plan", file, *on_l4).stdout
    )
    none_fits = blend("plan", write(*large, name="large.jsonl"), *on_l4)
    assert none_fits.status == 1
    assert "Every request needs more KV than l4 has; lower max_tokens" in none_fits.stderr


def test_the_same_file_gives_the_same_plan(
    planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    file = write(*mixed_lines(100))
    assert planned(file, *ON_A100) == planned(file, *ON_A100)


def test_without_a_model_on_the_machine_the_default_one_is_planned_by_its_sizes(
    planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    told = planned(write(*mixed_lines(4)))
    assert told["model"] == "smollm2-135m"
    assert not told["counted_with_tokenizer"]


def test_a_deadline_of_a_moment_is_shown_as_one(blend: Callable[..., Any], write: Callable[..., str]) -> None:
    file = write(*mixed_lines(2))
    assert "is done within 1 ms" in blend("plan", file, *ON_A100, "--deadline", "0.001s").stdout
    # So short that no number of replicas is a number.
    never = blend("plan", file, *ON_A100, "--deadline", "0." + "0" * 310 + "1s")
    assert never.status == 0, never.stderr


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("compute_flops_per_s = 1e-300", "has 1e-300 as compute_flops_per_s; make it a number from 1e+06"),
        ("bandwidth_bytes_per_s = 1e300", "has 1e+300 as bandwidth_bytes_per_s; make it a number from 1e+06"),
    ],
)
def test_a_profile_no_device_can_have_is_refused_by_field_value_and_range(
    blend: Callable[..., Any], write: Callable[..., str], tmp_path: Path, line: str, named: str
) -> None:
    save_device_profile(load_device_profile("l4"), tmp_path / "mine.toml")
    lines = (tmp_path / "mine.toml").read_text().splitlines()
    kept = [text for text in lines if not text.startswith(line.split()[0])]
    (tmp_path / "mine.toml").write_text("\n".join([*kept, line]))
    ran = blend("plan", write(*mixed_lines(2)), "--model", "llama-3.1-8b", "--device", "mine.toml")
    assert ran.status == 2
    assert named in ran.stderr


def test_a_plan_of_nothing_says_so(blend: Callable[..., Any], write: Callable[..., str]) -> None:
    wrong = blend("plan", write(b"nope"), *ON_A100)
    empty = blend("plan", write(b""), *ON_A100)
    assert (wrong.status, empty.status) == (1, 1)
    assert "No line holds a request that can be planned; `blend validate" in wrong.stderr
    assert "There is no line and no row to plan" in empty.stderr
    assert "blend validate" not in empty.stderr
    assert "Traceback" not in wrong.stderr + empty.stderr


def test_a_parquet_file_with_a_column_name_that_is_no_text_is_wrong_usage(
    blend: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "requests.parquet"
    pq.write_table(pa.table({"QQQQ": ["a"]}), file)
    file.write_bytes(file.read_bytes().replace(b"QQQQ", b"Q\xff\xfeQ"))
    for command in ("plan", "validate"):
        ran = blend(command, str(file))
        assert ran.status == 2
        assert "a column whose name is not UTF-8" in ran.stderr
        assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "SOURCE"),
        (("requests.jsonl", "--job-id", "job_1"), "SOURCE"),
        (("nowhere.jsonl", *ON_A100), "nowhere.jsonl"),
        (("nowhere.yaml", *ON_A100), "nowhere.yaml"),
        (("nowhere.jsonl", "--device", "tpu", "--model", "llama-3.1-8b"), "a100-80g"),
        (("nowhere.jsonl", *ON_A100, "--deadline", "soon"), "90m"),
        (("nowhere.jsonl", *ON_A100, "--deadline", "9" * 400 + "d"), "at most 3650d"),
        (("nowhere.jsonl", "--model", "gpt-0"), "preset, which needs no files (deepseek-v3, "),
    ],
)
def test_wrong_usage_is_one_sentence(
    blend: Callable[..., Any], arguments: tuple[str, ...], told: str
) -> None:
    ran = blend("plan", *arguments)
    assert ran.status == 2
    assert told in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert ran.stdout == ""


def test_a_preset_is_planned_without_torch_and_services(write: Callable[..., str], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from flows.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'prefect'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", write(*mixed_lines(10)), *ON_A100, "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_key_of_the_object_is_documented(
    planned: Callable[..., dict[str, Any]], write: Callable[..., str]
) -> None:
    told = planned(write(*mixed_lines(10)), *ON_A100, "--deadline", "1h")
    documented = (Path(__file__).parents[3] / "docs/plan.md").read_text()
    parts = [
        told,
        told["output_lengths"],
        told["policies"][0],
        told["density_histogram"][0],
        told["deadline"],
    ]
    missing = [key for part in parts for key in part if f"`{key}`" not in documented]
    assert missing == []


def test_services_are_asked_for_before_the_tokenizer_is_loaded(
    blend: Callable[..., Any], tmp_path: Path
) -> None:
    folder = make_tiny_llama(tmp_path / "tiny")
    job = tmp_path / "night.yaml"
    job.write_text(f"model: {folder}\ns3: [s3://blend/a.jsonl]\n")
    ran = blend("plan", str(job))
    assert ran.status == 1
    assert "do not run" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_the_seconds_of_a_tokenizer_are_announced(
    blend: Callable[..., Any], write: Callable[..., str], tmp_path: Path
) -> None:
    folder = make_tiny_llama(tmp_path / "tiny")
    requests = write(chat("a", "b", max_tokens=2))
    for command in ("plan", "validate"):
        ran = blend(command, requests, "--model", str(folder), "--json")
        assert f"loading the tokenizer of {folder} …\n" in ran.stderr
        json.loads(ran.stdout)
    assert "tokenizer" not in blend("plan", requests, "--model", str(folder), "--quick").stderr
