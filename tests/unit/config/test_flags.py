"""The table of flags covers vLLM's, points at fields that exist, and refuses with a reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hardpoint.config.arguments import FlexibleArgumentParser
from hardpoint.config.engine_args import EngineArgs, add_front_end_args
from hardpoint.config.flags import BY_DEST, ENGINE_FLAGS, FLAGS, NEVER, reason
from hardpoint.config.sections import VllmConfig
from hardpoint.config.sections.base import field_types, section_type
from hardpoint.errors import ConfigError

ROWS = [
    line.split("\t")
    for line in (Path(__file__).parent / "vllm_flags.tsv").read_text().splitlines()
    if not line.startswith("#")
]
# Marked as later, and there already.
EARLY = (
    "--data-parallel-address",
    "--data-parallel-rpc-port",
    "--data-parallel-size-local",
    "--aggregate-engine-logging",
    "--max-num-scheduled-tokens",
    "--max-num-active-seqs",
    "--long-prefill-token-threshold-adaptive",
)


@pytest.mark.parametrize(("name", "aliases", "mark"), ROWS)
def test_every_flag_of_vllm_has_a_row(name, aliases, mark):
    flag = BY_DEST[name[2:].replace("-", "_")]
    assert flag.names[0] == name
    assert set(aliases.split()) <= set(flag.names)
    if mark == "N":
        assert flag.why.startswith(NEVER)
    elif mark == "L":
        assert bool(flag.why) is (name not in EARLY)


def test_rows_point_at_fields_that_exist():
    for flag in FLAGS:
        kind = VllmConfig
        for name in filter(None, flag.field.split(".")):
            types = field_types(kind)
            assert name in types, f"{flag.names[0]}: {flag.field}"
            kind = section_type(types[name])


def test_names_are_unique():
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert len(BY_DEST) == len(FLAGS)


def test_supported_rows_have_a_help_text_and_refused_ones_a_reason():
    for flag in FLAGS:
        assert flag.help or flag.why
        if flag.why:
            assert reason(flag)
            assert flag.allows(flag.default)


def other_value(flag):
    """A value that is neither the default nor accepted besides it."""
    candidates = (True, False, 7, 0.5, "other", {"x": 1}, ["x"])
    kinds = flag.kind if isinstance(flag.kind, tuple) else ()
    return next(value for value in (*kinds, *candidates) if not flag.allows(value))


@pytest.mark.parametrize("flag", [flag for flag in ENGINE_FLAGS if flag.why], ids=lambda flag: flag.dest)
def test_a_refused_engine_argument_is_refused_by_name(flag):
    with pytest.raises(ConfigError) as caught:
        EngineArgs(**{flag.dest: other_value(flag)})
    assert flag.dest in str(caught.value)
    assert flag.why in str(caught.value)


def test_engine_args_have_the_rows_as_fields():
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    assert fields == {"model", *(flag.dest for flag in ENGINE_FLAGS)}


def test_help_shows_what_works_and_hides_what_is_refused():
    parser = FlexibleArgumentParser(prog="hardpoint serve")
    add_front_end_args(parser)
    EngineArgs.add_cli_args(parser)
    text = parser.format_help()
    shown = {line.split()[0].replace("--[no-]", "--").rstrip(",") for line in text.splitlines() if line.strip()}
    for flag in FLAGS:
        assert (flag.names[0] in shown) is not bool(flag.why and not flag.only), flag.names[0]
    assert "Speculative" not in text
