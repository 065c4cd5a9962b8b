from __future__ import annotations

from hardpoint.extensions.builtins import BUILTIN_PLATFORMS
from hardpoint.extensions.refs import load_ref
from hardpoint.platforms.cpu import CpuPlatform
from hardpoint.platforms.cuda import CudaPlatform
from hardpoint.testing import check_platform


def test_the_host_processor():
    check_platform(CpuPlatform, serves=True)


def test_nvidia_devices():
    check_platform(CudaPlatform)


def test_detectors_name_these_two_or_nothing():
    found = {load_ref(ref)() for ref in BUILTIN_PLATFORMS.values()} - {None}
    assert found <= {f"{cls.__module__}.{cls.__qualname__}" for cls in (CpuPlatform, CudaPlatform)}
