"""The import hook: reads, writes, errors and metadata, each in an interpreter of its own."""

import os
import subprocess
import sys
import textwrap

import pytest


def run(source, *, path=(), check=True):
    """Run source in a fresh interpreter; return what it printed."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, env=env, check=False
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.strip() if check else done


INSTALL = "from hardpoint import compat; compat.install()\n"


def test_without_the_alias_there_is_no_vllm():
    done = run("import hardpoint, vllm", check=False)
    assert "No module named 'vllm'" in done.stderr


def test_names_are_our_own_objects():
    assert run(
        INSTALL
        + """
import pickle
from vllm import SamplingParams
from vllm.sampling_params import SamplingParams as again
import vllm.config
from hardpoint.types.sampling_params import SamplingParams as ours
from hardpoint.config.sections import VllmConfig
params = SamplingParams(temperature=0.5)
assert SamplingParams is again is ours
assert vllm.config.VllmConfig is VllmConfig
assert isinstance(pickle.loads(pickle.dumps(params)), ours)
print(vllm.__version__)
"""
    ).startswith("0.32")


def test_a_write_reaches_the_owner_and_a_delete_undoes_it():
    run(
        INSTALL
        + """
import vllm.v1.core.sched.scheduler as theirs
import hardpoint.engine_core.scheduler.default as ours
original = ours.Scheduler
class Patched(original): ...
theirs.Scheduler = Patched
assert ours.Scheduler is Patched
from vllm.v1.core.sched.scheduler import Scheduler
assert Scheduler is Patched
theirs.new_name = 7
assert ours.new_name == 7
del theirs.new_name
assert not hasattr(ours, "new_name") and not hasattr(theirs, "new_name")
"""
    )


def test_a_write_to_a_composed_module_reaches_the_module_of_that_name():
    run(
        INSTALL
        + """
import vllm.config
from hardpoint.config import current
vllm.config.get_current_vllm_config_or_none = lambda: "patched"
assert current.get_current_vllm_config_or_none() == "patched"
"""
    )


def test_a_subclass_under_vllms_name_is_a_subclass_of_ours():
    run(
        INSTALL
        + """
from vllm.v1.metrics.loggers import StatLoggerBase
class Mine(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0): ...
    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0): ...
    def log_engine_initialized(self): ...
from hardpoint.contracts.stat_logger import StatLoggerBase as ours
assert issubclass(Mine, ours)
"""
    )


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("import vllm.no_such_module", "vllm.no_such_module is not part of Hardpoint's vllm alias"),
        ("from vllm import no_such_name", "vllm.no_such_name is not part of Hardpoint's vllm alias"),
        ("from vllm.config import Nope", "vllm.config.Nope is not part of Hardpoint's vllm alias"),
        ("import vllm; vllm.config.Nope", "vllm.config.Nope is not part of Hardpoint's vllm alias"),
        ("import vllm.model_executor.models.module_mapping", "waits for adapters on media encoders"),
        ("import vllm.model_executor.layers.mamba.abstract", "waits for state-space models"),
        ("from vllm.config.cache import register_kv_cache_dtype", "waits for KV cache dtypes"),
    ],
)
def test_what_is_missing_is_named(statement, text):
    done = run(INSTALL + statement, check=False)
    assert done.returncode != 0
    assert text in done.stderr
    assert "docs/compatibility.md" in done.stderr


def test_guarded_imports_and_questions_behave_as_usual():
    run(
        INSTALL
        + """
import importlib.util
try:
    from vllm.config import Nope
except ImportError:
    pass
else:
    raise SystemExit("no ImportError")
import vllm.config
assert not hasattr(vllm.config, "Nope")
assert getattr(vllm.config, "Nope", 3) == 3
assert importlib.util.find_spec("vllm.no_such_module") is None
assert importlib.util.find_spec("vllm.config").name == "vllm.config"
"""
    )


def test_the_metadata_answers_with_the_api_level():
    assert run(INSTALL + "import importlib.metadata as m; print(m.version('vllm'))") == "0.32.0"
    # A process that was not told to has no such distribution.
    assert run("import importlib.metadata as m; print([d.name for d in m.distributions(name='vllm')])") == "[]"


@pytest.fixture
def real_vllm(tmp_path):
    """A folder that looks like an installed vLLM with an entry point of its own."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("REAL = True\n__version__ = '9.9'\n")
    (tmp_path / "vllm" / "only_real.py").write_text("")
    info = tmp_path / "vllm-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nfrom_real = vllm:nothing\n")
    return tmp_path


def test_a_real_vllm_is_left_alone_outside_and_hidden_inside(real_vllm):
    assert run("import vllm; print(vllm.REAL)", path=[real_vllm]) == "True"
    out = run(
        INSTALL
        + """
import importlib.metadata as m, sys, vllm
assert not hasattr(vllm, "REAL")
try:
    import vllm.only_real
except ImportError:
    pass
else:
    raise SystemExit("the real one was imported")
assert not any("from_real" == e.name for e in m.entry_points(group="vllm.general_plugins"))
print(m.version("vllm"))
""",
        path=[real_vllm],
    )
    assert out == "0.32.0"


def test_a_real_vllm_that_is_already_imported_stays(real_vllm):
    assert run("import vllm\nfrom hardpoint import compat\nprint(compat.install(), vllm.REAL)", path=[real_vllm]) == (
        "False True"
    )


def test_uninstall_takes_it_out_again():
    run(
        INSTALL
        + """
import vllm.config
compat.uninstall()
try:
    import vllm
except ImportError:
    pass
else:
    raise SystemExit(1)
"""
    )
