"""Build hook: compile the CPU kernels into the package. Without a compiler the package is built without them."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "src/hardpoint/worker/kernels/libhardpoint.so"


class KernelsBuildHook(BuildHookInterface):
    """Puts the library beside the Python code that loads it, in a wheel and in an editable install alike."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are gathered."""
        root = Path(self.root)
        library = root / LIBRARY
        library.unlink(missing_ok=True)
        builder = _builder(root)
        try:
            builder.build(library)
        except builder.BuildError as error:
            self.app.display_warning(f"the CPU kernels are left out, computing stays in torch: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data.update(pure_python=False, tag=f"py3-none-{platform}", artifacts=[*build_data["artifacts"], LIBRARY])


def _builder(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("kernel_build", root / "csrc" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
