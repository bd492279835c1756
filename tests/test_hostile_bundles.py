"""Tests that the native library, Python and the commands reject the hostile bundles of
``hostile/bundles.py``.

The error for a hostile bundle must be one sentence that names the file. Rejecting the bundle must
take limited time and memory, and write no files. The native library is also tested under
sanitizers.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from hostile import bundles
from test_hostile_files import ended_commands
from test_native import SANITIZE, compile_c, sanitized, succeed  # noqa: F401  (a fixture)

import dlm_runtime
from dlm_export.bundle.manifest import read_manifest
from dlm_runtime.errors import DlmError, ExitCode

NATIVE = ("INVALID_ARGUMENT", "NOT_FOUND", "BAD_BUNDLE", "UNSUPPORTED", "ENGINE_FAILED")
SHORT = ["--max-new-tokens", "2", "--threads", "1"]
FEW = ["--count", "1", *SHORT]
MEMORY_MIB = 768  # limit on resident memory, with AddressSanitizer


@pytest.fixture(scope="module")
def hostile(llada_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of each hostile bundle, by name.

    "good" is a valid bundle, and the hostile bundles are changed copies of it. The folder that
    contains a bundle also contains a file "outside", which no command may open.
    """
    parent = tmp_path_factory.mktemp("hostile") / "bundles"
    found = {}
    for number, case in enumerate([bundles.Case("good", lambda _: None, ""), *bundles.CASES]):
        assert case.name not in found, case.name
        copy = parent / f"{number}" / "bundle"
        shutil.copytree(llada_bundle, copy)
        (copy.parent / "outside").write_bytes(b"outside")
        case.change(copy)
        found[case.name] = copy
    return found


def _looks(folder: Path) -> dict[str, tuple[int, ...]]:
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {
        str(path): (info.st_ino, info.st_mode, info.st_size, info.st_mtime_ns)
        for path, info in found.items()
    }


def _says(said: str, case: bundles.Case, bundle: Path) -> bool:
    """Return whether an error names the file, and contains the words of the case."""
    words = case.says if "|" in case.says else re.escape(case.says)
    return re.search(words, said) is not None and str(bundle) in said


def test_the_native_library_refuses_each_in_a_sentence_under_sanitizers(
    sanitized: Path,  # noqa: F811
    hostile: dict[str, Path],
    tmp_path: Path,
) -> None:
    driver = compile_c(
        tmp_path / "open_bundles", Path(__file__).parent / "open_bundles.c", sanitized, *SANITIZE
    )
    cases = [
        bundles.Case("good", lambda _: None, "", engine="onnxruntime"),
        *(c for c in bundles.CASES if c.engine is not None),
    ]
    arguments = [part for case in cases for part in (str(case.engine), str(hostile[case.name]))]
    options = f"detect_leaks=1:hard_rss_limit_mb={MEMORY_MIB}"
    ended = [
        line.split("\t") for line in succeed(driver, *arguments, ASAN_OPTIONS=options).splitlines()
    ]
    assert ended.pop(0) == ["OK", ""], "every one would be refused"
    wrong = []
    for case, (status, said) in zip(cases[1:], ended, strict=True):
        is_right = status in NATIVE and _says(said, case, hostile[case.name])
        if not is_right or not said.isprintable():
            wrong.append(f"{case.name}: {status}: {said}")
    assert not wrong, "\n".join(wrong)


def test_python_refuses_each_with_the_class_that_says_who_has_to_change_what(
    hostile: dict[str, Path],
) -> None:
    wrong = []
    for case in bundles.CASES:
        try:
            if case.engine is None or case in bundles.TEXTS:
                read_manifest(hostile[case.name])
            else:
                dlm_runtime.open(hostile[case.name], engine=case.engine, threads=1).close()
        except DlmError as err:
            # If a graph is damaged, ONNX Runtime may report an internal failure.
            is_right = err.exit_code == ExitCode.WRONG_INPUT or case in bundles.GRAPHS
            if not is_right or not _says(str(err), case, hostile[case.name]):
                wrong.append(f"{case.name}: {err!r}")
        else:
            wrong.append(f"{case.name}: it opens")
    assert not wrong, "\n".join(wrong)


def test_commands_refuse_each_in_one_line_and_write_nothing(
    hostile: dict[str, Path], llada_checkpoint: Path, tmp_path: Path
) -> None:
    commands: dict[str, list[str]] = {}
    for case in bundles.CASES:
        bundle = str(hostile[case.name])
        if (
            case not in bundles.GRAPHS
        ):  # inspect does not read the graph, so it accepts damaged graphs
            commands[f"inspect: {case.name}"] = ["inspect", bundle]
        # Passes do not need the text files.
        if case not in bundles.TEXTS and case.engine is not None:
            commands[f"run: {case.name}"] = ["run", bundle, "--tokens", "1,2", *SHORT]
        if (
            case.engine == "none" and case not in bundles.TEXTS
        ):  # for a damaged graph, verify runs PyTorch first
            commands[f"verify: {case.name}"] = [
                "verify",
                bundle,
                "--checkpoint",
                str(llada_checkpoint),
                *FEW,
            ]
    before = _looks(hostile["good"].parent.parent)
    good = str(hostile["good"])
    ended = ended_commands([["inspect", good], ["run", good, "--tokens", "1,2", *SHORT]], commands)
    wrong = [f"{name}: {end}"[:600] for name, end in ended.items() if not end.is_refusal]
    assert not wrong, "\n".join(wrong)
    assert _looks(hostile["good"].parent.parent) == before
