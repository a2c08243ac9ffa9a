"""Whether a plain ``pytest`` finds every test there is."""

from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parent


def test_no_directory_of_tests_is_left_out(request):
    left_out = request.config.getini("norecursedirs")
    folders = {file.parent.relative_to(TESTS) for file in TESTS.rglob("test_*.py")}
    assert Path("dist") in folders
    for folder in folders:
        for part in folder.parts:
            assert not any(fnmatch(part, pattern) for pattern in left_out), folder
