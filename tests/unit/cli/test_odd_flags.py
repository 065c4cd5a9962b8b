"""Flags of `serve` with values that make no sense: refused before anything starts, with flag, value and reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from hardpoint.cli import serve
from hardpoint.cli.main import USAGE_ERROR, Subparsers, explain, main
from hardpoint.config import flags as table
from hardpoint.config import model_files
from hardpoint.config.engine_args import AsyncEngineArgs
from hardpoint.config.flags import FLAGS, Flag, Whole
from hardpoint.config.weight_files import check_weights
from hardpoint.errors import ConfigError, HardpointError
from hardpoint.log import configure
from hardpoint.processes import front_end

HUGE = "99999999999999999999"
# No text can say what no field holds; what may be empty is so by default.
TEXTS = ["a\0b", ""]
NUMBERS = {
    table.INT: ["x", "1.5", HUGE, "-" + HUGE, ""],
    table.INTS: ["x", "1.5", HUGE, "0", ""],
    table.SIZE: ["x", "-7", "99999999999T", ""],
    table.FLOAT: ["x", "nan", "inf", "1e999", ""],
}
OBJECTS = ["nope", "[]", "3", '{"a": NaN}', ""]
# Objects whose flag may be a number or a word, too.
LOOSE = {"--compilation-config", "--logging-config", "--pooler-config"}
LISTS = ["[1]", '{"a": 1}', "[nope"]


def odd_values(flag: Flag) -> list[str]:
    kind = flag.kind
    if (
        flag.dest == "hf_token"
        or kind in (table.BOOL, table.CSV)
        or (isinstance(kind, type) and flag.names[0] in LOOSE)
    ):
        return []
    if isinstance(kind, tuple):
        return ["nope", "", "a\0b"]
    if isinstance(kind, Whole):
        return [str(kind.least - 1), HUGE, "x", "1.5", ""]
    if isinstance(kind, type):
        return ["nope", "[]", "3", '{"there_is_no_such_field": 1}', ""]
    if kind in NUMBERS:
        return NUMBERS[kind]
    if kind in (table.STR, table.WORDS, table.EACH):
        return [text for text in TEXTS if text or flag.default != ""]
    return {table.JSON: OBJECTS, table.JSONLIST: LISTS}[kind]


ODD = [(flag.names[0], value) for flag in FLAGS for value in odd_values(flag)]


@pytest.fixture(autouse=True)
def as_far_as_the_engine(monkeypatch) -> Iterator[None]:
    """`serve` up to where it would start processes; flags that set up logs write to the environment."""

    def resolve(args) -> int:
        front_end.check_early(args)
        front_end.api_servers(args)
        AsyncEngineArgs.from_cli_args(args).create_engine_config("server")
        return 0

    monkeypatch.setattr(front_end, "serve", resolve)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    configure()


@pytest.fixture(scope="module")
def parser():
    """Made once: it takes longer than everything else here."""
    subparsers = Subparsers([])
    serve.add_parser(subparsers)
    return subparsers.parser


@pytest.fixture
def refusal(parser, tiny_llama, capsys) -> Callable[..., tuple[int, str]]:
    """`refusal(*words)`: (exit status, what is said) of a start with these flags."""

    def start(*words: str) -> tuple[int, str]:
        try:
            args = parser.parse_args([str(tiny_llama), *words])
            status = args.run(args)
        except HardpointError as error:
            status = explain(error, "serve")
        return status, capsys.readouterr().err

    return start


def test_there_are_odd_values_for_most_flags():
    assert len({name for name, _ in ODD}) > len(FLAGS) / 2


@pytest.mark.parametrize(("name", "value"), ODD)
def test_a_value_that_makes_no_sense_is_refused_by_name(refusal, name, value):
    status, said = refusal(f"{name}={value}")
    assert status == USAGE_ERROR, said
    assert name in said
    assert "Traceback" not in said
    assert "fix: " in said or "is refused" in said


def good_words(flag: Flag) -> list[str]:
    """A value that makes sense, as far as the kind of a flag tells one."""
    if isinstance(flag.kind, Whole):
        return [str(max(flag.kind.least, 1))]
    if flag.kind in (table.INT, table.SIZE):
        return [str(flag.default or 1)]
    kinds = {table.FLOAT: ["0.5"], table.INTS: ["1", "2"], table.WORDS: ["a", "b"], table.EACH: ["a"]}
    return kinds.get(flag.kind, []) if isinstance(flag.kind, str) else []


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if good_words(flag)], ids=lambda flag: flag.names[0])
def test_a_value_that_makes_sense_is_read(parser, flag):
    words = good_words(flag)
    found = getattr(parser.parse_args([flag.names[0], *words]), flag.dest)
    assert list(map(str, found if isinstance(found, list) else [found])) == words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tensor-parallel-size", "0"], "0 is out of range: expected int >= 1"),
        (["--data-parallel-size", "2000"], "2000 is out of range: expected int <= 1024"),
        (["--api-server-count", "0"], "0 is out of range"),
        (["--shutdown-timeout", "-1"], "-1 is out of range"),
        (["--gpu-memory-utilization", "1.5"], "1.5 is out of range"),
        (["--scheduler-cls", ""], "--scheduler-cls is an empty text"),
        (["--ssl-ca-certs", "/no/such"], "--ssl-ca-certs says nothing without a certificate"),
        (["--enable-ssl-refresh"], "--enable-ssl-refresh says nothing without a certificate"),
        (["--data-parallel-address", "127.0.0.1"], "has no meaning for a server with an engine of its own"),
        (["--max-loras", "3"], "--max-loras says nothing without --enable-lora"),
        (["--model", ""], "MODEL is an empty text"),
    ],
)
def test_what_is_said_of_them(refusal, monkeypatch, words, said):
    monkeypatch.setattr(front_end, "serve", lambda args: front_end.check_early(args) or front_end.start_engine(args))
    status, text = refusal(*words)
    assert (status, said in text) == (USAGE_ERROR, True), text


@pytest.mark.parametrize(
    ("words", "flag", "said"),
    [
        (["--scheduler-cls", "no.such.Scheduler"], "--scheduler-cls", "there is no module 'no'"),
        (["--scheduler-cls", "hardpoint.nope.Scheduler"], "--scheduler-cls", "there is no module 'hardpoint.nope'"),
        (["--worker-cls", "hardpoint.worker.device_worker.Wroker"], "--worker-cls", "has no attribute 'Wroker'"),
        (["--worker-cls", "vllm.no_such.Worker"], "--worker-cls", "'vllm.no_such.Worker'"),
        (["--worker-extension-cls", "json.tool.nope.X"], "--worker-extension-cls", "'json.tool' is not a package"),
        (["--logits-processors", "json:Nope"], "--logits-processors", "'json' has no attribute 'Nope'"),
        (["--distributed-executor-backend", "no.such.Executor"], "--distributed-executor-backend", "no.such.Executor"),
        (["--max-model-len", "0"], "--max-model-len", "model_config.max_model_len is 0"),
        (["--structured-outputs-config", '{"bakcend": "x"}'], "--structured-outputs-config", "did you mean backend?"),
        (["--log-config-file", "/no/such/file"], "--log-config-file", "'/no/such/file' cannot be used"),
    ],
)
def test_what_the_configuration_refuses_names_the_flag(refusal, words, flag, said):
    status, text = refusal(*words)
    assert status != 0
    assert flag in text
    assert said in text
    assert "Traceback" not in text


BROKEN = {
    "an empty file": lambda path: path.write_bytes(b""),
    "not a GGUF file": lambda path: path.write_bytes(b"hello" * 10),
    "a link to nowhere": lambda path: path.symlink_to("/no/such/file"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a folder": lambda path: path.mkdir(),
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("name", ["model.gguf", "folder"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_path_is_never_looked_for_elsewhere(tmp_path, monkeypatch, capsys, kind, name):
    def ask_nobody(ref):
        assert "huggingface_hub" not in ref, "the hub is asked"
        return load_ref(ref)

    load_ref = model_files.load_ref
    monkeypatch.setattr(model_files, "load_ref", ask_nobody)
    BROKEN[kind](tmp_path / name)
    assert main(["serve", str(tmp_path / name)]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / name) in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda path: path.unlink(), "has no *.safetensors file"),
        (lambda path: path.write_bytes(b""), "it is cut, damaged or not a safetensors file (0 bytes)"),
        (lambda path: (path.unlink(), path.symlink_to("/no/such")), "it is a link to /no/such, which does not exist"),
        (lambda path: (path.unlink(), path.mkdir()), "it is not a file"),
    ],
)
def test_weights_that_are_not_there_are_found_before_the_engine_core_is_sent_anything(make_tiny_llama, break_it, said):
    folder = make_tiny_llama()
    check_weights(AsyncEngineArgs(model=str(folder)).create_engine_config())
    options = AsyncEngineArgs(model=str(folder), model_loader_extra_config={"x": 1}).create_engine_config()
    with pytest.raises(ConfigError, match="knows no x"):
        check_weights(options)
    break_it(folder / "model.safetensors")
    config = AsyncEngineArgs(model=str(folder)).create_engine_config()
    with pytest.raises(HardpointError, match="tiny-llama") as caught:
        check_weights(config)
    assert said in str(caught.value)
