"""The conveniences of the command line: spelling, sizes, dotted JSON, configuration files, near misses."""

from __future__ import annotations

import pytest

from hardpoint.config.arguments import FlagError, FlexibleArgumentParser, check_refused
from hardpoint.config.engine_args import AsyncEngineArgs, EngineArgs, add_front_end_args
from hardpoint.config.flags import FLAGS


@pytest.fixture(scope="module")
def parser():
    made = FlexibleArgumentParser(prog="hardpoint serve")
    made.add_argument("model_tag", nargs="?")
    add_front_end_args(made)
    AsyncEngineArgs.add_cli_args(made)
    return made


@pytest.fixture
def parse(parser):
    def run(*words: str):
        found = parser.parse_args(list(words))
        check_refused(FLAGS, found)
        return found

    return run


def test_dashes_and_underscores_are_alike(parse):
    assert parse("--max_model_len", "2048").max_model_len == 2048
    assert parse("--max-model_len=2048").max_model_len == 2048
    assert parse("--served_model_name", "a_b").served_model_name == ["a_b"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("8k", 8000),
        ("8K", 8192),
        ("1.5k", 1500),
        ("2M", 2 << 20),
        ("1g", 10**9),
        ("auto", -1),
        ("-1", -1),
    ],
)
def test_sizes(parse, text, value):
    assert parse(f"--max-model-len={text}").max_model_len == value


@pytest.mark.parametrize("text", ["8q", "k", "", "1.0001k", "8 k"])
def test_bad_sizes_are_named(parse, text):
    with pytest.raises(FlagError, match="--max-model-len"):
        parse(f"--max-model-len={text}")


def test_switches_have_two_forms(parse):
    assert parse().enable_prefix_caching is None
    assert parse("--enable-prefix-caching").enable_prefix_caching is True
    assert parse("--no-enable-prefix-caching").enable_prefix_caching is False
    assert parse("--no_enable_prefix_caching").enable_prefix_caching is False


def test_optimisation_levels(parse):
    assert parse("-O0").optimization_level == 0
    assert parse().optimization_level == 2
    with pytest.raises(FlagError, match="--optimization-level is refused"):
        parse("-O3")


def test_json_and_dotted_forms_merge(parse):
    found = parse(
        "--compilation-config.mode", "0", "--compilation-config", '{"custom_ops": ["none"]}',
        "--compilation_config.custom_ops+=+rms_norm", "-cc.pass_config.eliminate_noops", "false",
    )  # fmt: skip
    assert found.compilation_config == {
        "mode": 0,
        "custom_ops": ["none", "+rms_norm"],
        "pass_config": {"eliminate_noops": False},
    }


def test_lists_are_appended_to(parse):
    found = parse("--additional-config.items+", "a", "--additional-config.items+", '["b", 3]')
    assert found.additional_config == {"items": ["a", "b", 3]}


def test_dotted_values_are_json_or_text(parse):
    found = parse("--additional-config.a", "1.5", "--additional-config.b=text", "--additional-config.c", '{"d": null}')
    assert found.additional_config == {"a": 1.5, "b": "text", "c": {"d": None}}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--hf-overrides", "{bad"], "'{bad' is not JSON"),
        (["--hf-overrides", "[1]"], "is not a JSON object"),
        (["--additional-config.a", "1", "--additional-config.a.b", "2"], "already has a value"),
        (["--additional-config.a"], "expects a value"),
        (["--additional-config", "3", "--additional-config.a", "2"], "cannot be combined"),
        (["--port", "70000"], "out of range: expected 0 to 65535"),
        (["--port=-1"], "out of range"),
        (["--scheduling-policy", "fair"], "--scheduling-policy"),
        (["--max-num-seq", "4"], r"unknown flag --max-num-seq; did you mean --max-num-seqs\?"),
        (["--enforce-eage"], r"did you mean --enforce-eager\?"),
        (["--zzz"], "unknown flag --zzz$"),
        (["a", "b"], "unexpected argument 'b'"),
    ],
)
def test_what_makes_no_sense_is_one_clear_error(parse, words, text):
    with pytest.raises(FlagError) as caught:
        parse(*words)
    assert caught.match(text.replace("$", "(?= Fix)") if text.endswith("$") else text)
    assert "\n" not in caught.value.what


@pytest.mark.parametrize(
    "words",
    [
        ["--fully-sharded-loras"],
        ["--default-mm-loras", '{"image": "x"}'],
        ["--nnodes", "2"],
        ["-dcp", "2"],
        ["--speculative-config", "{}"],
        ["--tool-server", "demo"],
        ["--grpc"],
        ["--enable-dbo"],
        ["--data-parallel-rank", "1"],
        ["--runner", "draft"],
    ],
)
def test_what_we_do_not_have_is_refused_by_name(parse, words):
    with pytest.raises(FlagError, match="is refused: ") as caught:
        parse(*words)
    assert caught.value.code == "flag-refused"


@pytest.mark.parametrize("words", [["--no-enable-lora"], ["-tp", "1"], ["--api-server-count", "1"]])
def test_asking_for_what_happens_anyway_is_no_error(parse, words):
    parse(*words)


def test_lists_of_words_extend_and_repeat(parse):
    assert parse("--api-key", "a", "b", "--api-key", "c").api_key == ["a", "b", "c"]
    assert parse("--middleware", "m.A", "--middleware", "m.B").middleware == ["m.A", "m.B"]
    assert parse("--allowed-origins", '["http://a", "http://b"]').allowed_origins == ["http://a", "http://b"]
    assert parse("--allowed-origins", "*").allowed_origins == ["*"]
    assert parse().middleware == []


def test_defaults_are_not_shared(parse):
    parse().middleware.append("x")
    assert parse().middleware == []


def test_token_without_a_value_means_the_stored_one(parse):
    assert parse("--hf-token").hf_token is True
    assert parse("--hf-token", "abc").hf_token == "abc"


# -- configuration file ------------------------------------------------------------------------------

FILE = """
model: /models/from-file
port: 8001
enable-prefix-caching: false
trust_remote_code: true
max-model-len: 8k
served-model-name: [one, two]
api-key: [k1]
middleware:
  - m.A
compilation-config:
  custom_ops: ["+rms_norm"]
plugin-config:
  my_plugin: {depth: 3, names: [a]}
tokenizer:
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return str(path)


def test_file_gives_flags(parse, file):
    found = parse("--config", file)
    assert found.model_tag == "/models/from-file"
    assert (found.port, found.max_model_len) == (8001, 8000)
    assert (found.enable_prefix_caching, found.trust_remote_code) == (False, True)
    assert (found.served_model_name, found.api_key, found.middleware) == (["one", "two"], ["k1"], ["m.A"])
    assert found.compilation_config == {"custom_ops": ["+rms_norm"]}
    assert EngineArgs(plugin_config=found.plugin_config)._plugins().settings == {
        "my_plugin": {"depth": 3, "names": ["a"]}
    }
    assert found.tokenizer is None


def test_command_line_wins_over_the_file(parse, file):
    found = parse("mine", f"--config={file}", "--port", "9", "--served-model-name", "three", "--no-trust-remote-code")
    assert (found.model_tag, found.port, found.served_model_name) == ("mine", 9, ["three"])
    assert found.trust_remote_code is False
    assert parse("--config", file, "--enable-prefix-caching").enable_prefix_caching is True
    dotted = parse("--config", file, "--compilation-config.mode", "0")
    assert dotted.compilation_config == {"custom_ops": ["+rms_norm"], "mode": 0}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("prot: 1", "unknown flag --prot; did you mean --port"),
        ("- 1", "no mapping"),
        ("a: [", "is not YAML"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
        ("port: x", "--port"),
        ("grpc: true", "--grpc is refused"),
    ],
)
def test_a_bad_file_is_one_clear_error(parse, tmp_path, content, text):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(FlagError, match=text):
        parse("--config", str(path))


def test_a_missing_file_is_named(parse):
    with pytest.raises(FlagError, match=r"--config /no/such\.yaml cannot be read: No such file"):
        parse("--config", "/no/such.yaml")
    with pytest.raises(FlagError, match="--config expects a file"):
        parse("--config")
    with pytest.raises(FlagError, match="may be given once"):
        parse("--config", "a", "--config", "b")


def test_a_plugin_may_add_flags():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--toy-depth", type=int, default=1)
    assert parser.parse_args(["--toy_depth", "4"]).toy_depth == 4
