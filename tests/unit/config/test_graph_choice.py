"""Whether device graphs are captured, and for which numbers of requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hardpoint.config.arguments import FlexibleArgumentParser
from hardpoint.config.engine_args import EngineArgs
from hardpoint.config.graph_choice import choose_graphs
from hardpoint.config.sections import CUDAGraphMode
from hardpoint.errors import ConfigError

CUDA = SimpleNamespace(device_type="cuda", support_static_graph_mode=lambda: True)


@pytest.fixture
def settled(tiny_llama):
    def settle(mode=CUDAGraphMode.FULL_DECODE_ONLY, platform=CUDA, max_num_seqs=20, **fields):
        config = EngineArgs(model=str(tiny_llama), max_num_seqs=max_num_seqs).create_engine_config()
        compilation = config.compilation_config
        compilation.cudagraph_mode = mode
        for name, value in fields.items():
            owner = config.parallel_config if name == "world_size" else config.model_config
            setattr(compilation if hasattr(compilation, name) else owner, name, value)
        choose_graphs(config, platform)
        return compilation

    return settle


def test_nothing_is_captured_unless_asked_for(settled):
    assert settled(None).cudagraph_mode is CUDAGraphMode.NONE
    assert settled(enforce_eager=True).cudagraph_mode is CUDAGraphMode.NONE


def test_sizes_go_up_to_the_requests_there_can_be(settled):
    assert settled().cudagraph_capture_sizes == [1, 2, 4, 8, 16, 20]
    assert settled(max_cudagraph_capture_size=8).cudagraph_capture_sizes == [1, 2, 4, 8]
    assert settled(max_num_seqs=1).cudagraph_capture_sizes == [1]
    assert settled(cudagraph_capture_sizes=[6, 3, 3]).cudagraph_capture_sizes == [3, 6]
    assert settled(max_num_seqs=1000).cudagraph_capture_sizes[-1] == 256


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mode": CUDAGraphMode.FULL}, "FULL_DECODE_ONLY"),
        ({"mode": CUDAGraphMode.PIECEWISE}, "FULL_DECODE_ONLY"),
        ({"platform": SimpleNamespace(device_type="cpu")}, "this platform does not have"),
        ({"world_size": 2}, "one rank only"),
        ({"chosen_runner": "pooling"}, "this model pools"),
        ({"cudagraph_capture_sizes": []}, "from 1 to 20"),
        ({"cudagraph_capture_sizes": [0, 4]}, "from 1 to 20"),
        ({"cudagraph_capture_sizes": [21]}, "from 1 to 20"),
        ({"cudagraph_capture_sizes": [4], "max_cudagraph_capture_size": 4}, "one of the two"),
        ({"mode": None, "cudagraph_capture_sizes": [4]}, "none are captured"),
        ({"mode": CUDAGraphMode.NONE, "max_cudagraph_capture_size": 4}, "none are captured"),
    ],
)
def test_what_cannot_be_is_refused(settled, change, said):
    with pytest.raises(ConfigError, match="compilation_config") as caught:
        settled(**change)
    assert said in str(caught.value)


def test_the_flags_reach_the_configuration(tiny_llama):
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    words = ["--model", str(tiny_llama), "--compilation-config.cudagraph_mode", "FULL_DECODE_ONLY"]
    args = EngineArgs.from_cli_args(parser.parse_args([*words, "--cudagraph-capture-sizes", "1", "2", "4"]))
    assert args.cudagraph_capture_sizes == [1, 2, 4]
    with pytest.raises(ConfigError, match="this platform does not have"):
        args.create_engine_config()


def test_a_start_on_a_processor_refuses_them(tiny_llama):
    args = EngineArgs(model=str(tiny_llama), compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"})
    with pytest.raises(ConfigError, match="device graphs"):
        args.create_engine_config()
