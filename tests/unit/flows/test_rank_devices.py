import pytest
import torch

from blend_core.errors import ConfigurationError
from flows.rank_devices import locked_devices, rank_devices, threads_of_rank


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which torch sees four GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def test_a_cpu_is_one_rank_and_shared_by_as_many_as_are_asked_for() -> None:
    assert rank_devices("cpu", None) == ("cpu",)
    assert rank_devices("cpu", 3) == ("cpu", "cpu", "cpu")


@pytest.mark.usefixtures("four_gpus")
def test_cuda_is_a_rank_on_every_gpu() -> None:
    assert rank_devices("cuda", None) == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert rank_devices("cuda", 2) == ("cuda:0", "cuda:1")
    assert rank_devices("cuda:3", None) == ("cuda:3",)


@pytest.mark.usefixtures("four_gpus")
def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="5 ranks, and BLEND_ENGINE__DEVICE=cuda is 4 GPUs"):
        rank_devices("cuda", 5)
    with pytest.raises(ConfigurationError, match="cuda:1 is 1 GPU;"):
        rank_devices("cuda:1", 2)


def test_every_gpu_of_a_rank_is_locked_by_itself() -> None:
    assert locked_devices(["cuda:2,3", "cuda:0,1"], "") == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert locked_devices(["cuda:1"], "") == ("cuda:1",)
    assert locked_devices(["cpu", "cpu"], "") == ("cpu",)


def test_a_gpu_is_locked_by_its_own_number_whatever_a_process_sees() -> None:
    assert locked_devices(["cuda:0,1"], "6, 4") == ("cuda:4", "cuda:6")
    assert locked_devices(["cuda:0"], "GPU-8f") == ("cuda:GPU-8f",)
    assert locked_devices(["cuda:3"], "6") == ("cuda:3",)
    assert locked_devices(["cpu"], "6") == ("cpu",)


def test_ranks_on_one_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert threads_of_rank("cpu", ["cpu", "cpu"]) == 4
    assert threads_of_rank("cpu", ["cpu"]) is None
    assert threads_of_rank("cuda:0", ["cuda:0", "cuda:1"]) is None
