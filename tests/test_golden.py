"""Tests of golden files, without torch.

A golden file contains the logits of the released code for some canvases. Golden files are written
completely, read safely, and compared with bundles.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import llada_config, write_checkpoint
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dlm_runtime
from dlm_export.bundle.folder import sha256
from dlm_export.cli import main
from dlm_export.judging.parity import golden
from dlm_export.judging.parity.canvases import make_canvases, random_prompts
from dlm_export.judging.parity.golden import Golden, GoldenError, Provenance
from dlm_export.outputs import OutputError
from dlm_export.sources import network_of


def provenance(checkpoint: Path) -> Provenance:
    return Provenance(
        kind=golden.RELEASED,
        class_name="LLaDAModelLM",
        module="modeling_llada.py",
        attention="chosen by the class",
        code={"modeling_llada.py": 64 * "0"},
        checkpoint=checkpoint.name,
        config_sha256=sha256(checkpoint / "config.json"),
        weights={"model.safetensors": 64 * "1"},
        mask_token_id=150,
        seed=0,
        prompts="random",
        versions={"python": "3.11.7", "torch": "2.5.1", "transformers": "4.46.2", "numpy": "2.1.0"},
    )


@pytest.fixture(scope="module")
def kept(llada_checkpoint: Path, llada_bundle: Path) -> Golden:
    """A golden file whose logits come from the bundle and not from the released code.

    The tests therefore only cover the reading, writing and comparing of golden files.
    """
    with dlm_runtime.open(llada_bundle, threads=1) as bundle:
        network = network_of(bundle.manifest)
        canvases = make_canvases(network, random_prompts(network, 2, 0), 0)
        logits = [bundle.logits(canvas.tokens.tolist())[canvas.rows] for canvas in canvases]
    return Golden(provenance(llada_checkpoint), canvases, logits)


@pytest.fixture
def file(kept: Golden, tmp_path: Path) -> Path:
    path = tmp_path / "llada.npz"
    golden.save(path, kept)
    return path


def verify(bundle: Path, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["verify", str(bundle), "--threads", "1", *map(str, arguments)])


# ---- Files ----


def test_a_golden_file_is_read_as_it_was_written(kept: Golden, file: Path, tmp_path: Path) -> None:
    found = golden.load(file)
    assert found.provenance == kept.provenance
    assert found.rows == kept.rows == 2 * 10 * 16
    for ours, theirs in zip(found.canvases, kept.canvases, strict=True):
        assert ours.mask_ratio == theirs.mask_ratio
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.rows, theirs.rows)
    np.testing.assert_array_equal(np.concatenate(found.logits), np.concatenate(kept.logits))
    golden.save(tmp_path / "again.npz", found)
    assert (tmp_path / "again.npz").read_bytes() == file.read_bytes()


def test_a_golden_file_is_written_whole_or_not_at_all(
    kept: Golden, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fail)
    with (
        pytest.raises(OutputError, match="the disk is full"),
        golden.claimed(file, force=True) as new,
    ):
        golden.save(new, kept)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == [file.name]


def test_a_file_that_is_there_and_another_suffix_are_refused_before_any_work(
    file: Path, tmp_path: Path
) -> None:
    (checkpoint := tmp_path / "checkpoint").mkdir()
    for output, says in (
        (file, "exists. Pass --force"),
        (tmp_path / "golden.pt", "the name must end in .npz"),
    ):
        result = CliRunner().invoke(main, ["capture", str(checkpoint), "-o", str(output)])
        assert (result.exit_code, says in result.output) == (2, True), result.output


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_refused_in_a_sentence(file: Path, data: st.DataObject) -> None:
    content = bytearray(file.read_bytes())
    whole = bytes(content)
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[at:]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    damaged = file.with_name("damaged.npz")
    damaged.write_bytes(content)
    found, said = None, ""
    try:
        found = golden.load(damaged)
    except GoldenError as err:
        said = str(err)
    if found is None:
        assert str(damaged) in said
    else:  # the changed byte has no effect, as in a date
        np.testing.assert_array_equal(
            np.concatenate(found.logits), np.concatenate(golden.load(file).logits)
        )
    assert file.read_bytes() == whole


def _npy(array: np.ndarray, header: str | None = None) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=True)
    content = out.getvalue()
    if header is None:
        return content
    text = header.ljust(len(content[10 : content.index(b"\n") + 1]) - 1).encode() + b"\n"
    return (
        content[:8] + len(text).to_bytes(2, "little") + text + content[content.index(b"\n") + 1 :]
    )


def _edit(
    change: Callable[[dict[str, Any]], object],
) -> Callable[[dict[str, np.ndarray]], dict[str, bytes]]:
    """Change the entries of a golden file that say from what it was made."""

    def edit(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
        values = json.loads(arrays["provenance"].tobytes())
        change(values)
        return {"provenance": _npy(np.frombuffer(json.dumps(values).encode(), np.uint8))}

    return edit


def _array(
    name: str, change: Callable[[np.ndarray], np.ndarray]
) -> Callable[[dict[str, np.ndarray]], dict[str, bytes]]:
    return lambda arrays: {name: _npy(change(arrays[name].copy()))}


def _with(array: np.ndarray, index: Any, value: Any) -> np.ndarray:
    array[index] = value
    return array


HOSTILE: dict[str, tuple[Callable[[dict[str, np.ndarray]], dict[str, bytes]], str]] = {
    "pickled objects": (lambda _: {"tokens": _npy(np.array([print], object))}, "tokens is object"),
    "a header that asks for a petabyte": (
        lambda a: {
            "tokens": _npy(
                a["tokens"],
                "{'descr': '<i8', 'fortran_order': False, 'shape': (140737488355328,), }",
            )
        },
        r"tokens claims shape \[140737488355328\], but has",
    ),
    "a negative shape": (
        lambda a: {
            "logits": _npy(
                a["logits"], "{'descr': '<f4', 'fortran_order': False, 'shape': (-320, -160), }"
            )
        },
        "not a golden file, or a damaged one",
    ),
    "a header that is no header": (
        lambda a: {"tokens": _npy(a["tokens"], "(((((((((((")},
        "not a golden file, or a damaged one",
    ),
    "other precision": (_array("logits", lambda x: x.astype(np.float64)), "logits is float64"),
    "no canvas": (_array("mask_ratios", lambda x: x[:0]), "0 mask ratios"),
    "a ratio of nothing": (
        _array("mask_ratios", lambda x: _with(x, 0, np.nan)),
        r"a mask ratio is outside \(0, 1\]",
    ),
    "lengths that overflow": (
        _array("lengths", lambda x: _with(x, 0, 1 << 62)),
        "tokens has 1200 entries",
    ),
    "negative lengths": (
        _array("lengths", lambda x: _with(x, slice(0, 2), (-10, 130))),
        "tokens has 1200 entries",
    ),
    "a token outside the vocabulary": (
        _array("tokens", lambda x: _with(x, 3, 160)),
        "outside the vocabulary of 160",
    ),
    "a row outside its canvas": (
        _array("rows", lambda x: _with(x, 15, 60)),
        "not ascending positions",
    ),
    "rows out of order": (
        _array("rows", lambda x: _with(x, [0, 1], x[[1, 0]])),
        "not ascending positions",
    ),
    "NaN logits": (_array("logits", lambda x: _with(x, (5, 5), np.nan)), "NaN or infinite logits"),
    "fewer logits than rows": (
        _array("logits", lambda x: x[:-1]),
        r"logits \[319, 160\] for 320 rows",
    ),
    "provenance that is no JSON": (
        lambda _: {"provenance": _npy(np.frombuffer(b"{", np.uint8))},
        "Expecting property name",
    ),
    "another format": (
        _edit(lambda v: v.update(format={"name": "weights"})),
        "its provenance is not that of a golden file",
    ),
    "a newer version": (
        _edit(lambda v: v["format"].update(version=2)),
        "golden file of version 2; this dlm-export reads version 1",
    ),
    "an unknown kind": (
        _edit(lambda v: v.update(kind="oracle")),
        "kind 'oracle' is not one of released code",
    ),
    "a missing field": (_edit(lambda v: v.pop("versions")), "expected .*versions"),
    "escapes for the terminal": (
        _edit(lambda v: v.update(class_name="\x1b[2J")),
        "class_name has a wrong type or value",
    ),
    "a text without end": (
        _edit(lambda v: v.update(module="m" * 1000)),
        "module has a wrong type or value",
    ),
    "numbers for versions": (
        _edit(lambda v: v.update(versions={"torch": 2})),
        "versions has a wrong type or value",
    ),
}


def _rewrite(path: Path, replaced: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    content |= {f"{name}.npy": data for name, data in replaced.items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in content.items():
            archive.writestr(name, data)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_content_is_refused_in_a_sentence(file: Path, name: str) -> None:
    change, says = HOSTILE[name]
    with np.load(file) as arrays:
        _rewrite(file, change(dict(arrays)))
    with pytest.raises(GoldenError, match=says) as caught:
        golden.load(file)
    assert len(str(caught.value)) < 1000


def test_compressed_entries_are_refused_before_they_are_unpacked(file: Path) -> None:
    _rewrite(file, {"tokens": _npy(np.zeros(1 << 20, np.int64))}, zipfile.ZIP_DEFLATED)
    with pytest.raises(GoldenError, match="is compressed"):
        golden.load(file)


def test_what_is_no_file_is_refused(tmp_path: Path, llada_bundle: Path) -> None:
    for path, says in ((tmp_path, "is a directory"), (tmp_path / "nowhere.npz", "does not exist")):
        result = verify(llada_bundle, "--golden", path)
        assert (result.exit_code, says in result.output) == (2, True), result.output
        with pytest.raises(GoldenError, match="`dlm-export capture` writes one"):
            golden.load(path)


# ---- Comparing ----


def test_verify_says_which_parity_it_proved(
    llada_bundle: Path, llada_checkpoint: Path, file: Path
) -> None:
    released = "the released code's logits (LLaDAModelLM of modeling_llada.py, transformers 4.46.2, torch 2.5.1)"
    result = verify(llada_bundle, "--golden", file)
    assert result.exit_code == 0, result.output
    assert f"Compared with {released}" in result.stdout
    told = json.loads(verify(llada_bundle, "--golden", file, "--json").stdout)
    assert (told["passed"], told["reference"], told["loop"]) == (True, released, [])
    assert len(told["graph"]) == 10
    assert told["golden"]["code"] == {"modeling_llada.py": 64 * "0"}
    few = ("--count", 1, "--new-tokens", 4)
    ours = json.loads(verify(llada_bundle, "--checkpoint", llada_checkpoint, *few, "--json").stdout)
    assert (ours["passed"], ours["reference"]) == (True, "our torch denoiser")


def test_logits_that_differ_exit_3_and_name_the_mask_ratio(
    llada_bundle: Path, kept: Golden, tmp_path: Path
) -> None:
    logits = [each.copy() for each in kept.logits]
    span = max(float(each.max() - each.min()) for each in logits)
    logits[-1][0, 7] += 1e-3 * span
    path = tmp_path / "other.npz"
    golden.save(path, dataclasses.replace(kept, logits=logits))
    result = verify(llada_bundle, "--golden", path)
    assert result.exit_code == 3, result.output
    assert "FAILS at fp32" in result.stdout
    assert "mask ratio 0.95: logits differ by" in result.stderr
    assert "mask ratio 0.85" not in result.stderr
    assert "compared with the released code's logits" in result.stderr


def test_a_golden_file_of_another_checkpoint_is_refused_by_name(
    llada_bundle: Path, llada_checkpoint: Path, dream_checkpoint: Path, kept: Golden, tmp_path: Path
) -> None:
    path = tmp_path / "other.npz"
    golden.save(path, dataclasses.replace(kept, provenance=provenance(dream_checkpoint)))
    result = verify(llada_bundle, "--golden", path)
    theirs, ours = (
        sha256(dream_checkpoint / "config.json"),
        sha256(llada_checkpoint / "config.json"),
    )
    says = f"captured from another checkpoint (dream): its config.json has SHA-256 {theirs}, that of {llada_bundle} has {ours}"
    assert (result.exit_code, says in result.output) == (2, True), result.output
    wider = [np.pad(logits, ((0, 0), (0, 8))) for logits in kept.logits]
    golden.save(path, dataclasses.replace(kept, logits=wider))
    says = f"captured from another checkpoint (llada): its vocabulary has 168 tokens, that of {llada_bundle} has 160"
    result = verify(llada_bundle, "--golden", path)
    assert (result.exit_code, says in result.output) == (2, True), result.output


def test_half_precision_has_its_own_tolerance(
    llada_bundle: Path, llada_checkpoint: Path, file: Path, tmp_path: Path
) -> None:
    """The golden file's logits come from an fp32 bundle.

    A copy of the bundle in fp16 is compared with a larger tolerance.
    """
    half = tmp_path / "half"
    options = ("--precision", "fp16", "--no-verify", "-o", str(half))
    result = CliRunner().invoke(main, ["quantize", str(llada_bundle), *options])
    assert result.exit_code == 0, result.output
    for bundle in (llada_bundle, half):
        manifest = json.loads((bundle / "manifest.json").read_text())
        assert manifest["source"]["config_sha256"] == sha256(llada_checkpoint / "config.json")
    told = json.loads(verify(half, "--golden", file, "--json").stdout)
    assert (told["precision"], told["tolerance"]["relative"], told["passed"]) == (
        "fp16",
        2e-2,
        True,
    )
    assert max(row["relative"] for row in told["graph"]) > 2e-4


def test_a_quantised_bundle_is_refused(llada_bundle: Path, file: Path, tmp_path: Path) -> None:
    """A quantised bundle differs from the released code by its quantisation loss.

    The judge of a build measures this loss, so a comparison with a golden file is refused.
    """
    bundle = tmp_path / "bundle"
    shutil.copytree(llada_bundle, bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["precision"]["name"] = "int8"
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    result = verify(bundle, "--golden", file)
    assert (result.exit_code, "is quantised (int8)" in result.output) == (2, True), result.output


def test_canvases_longer_than_the_bundle_takes_are_refused(
    llada_bundle: Path, kept: Golden, tmp_path: Path
) -> None:
    long = dataclasses.replace(kept.canvases[0], tokens=np.zeros(300, np.int64))
    golden.save(
        tmp_path / "long.npz", dataclasses.replace(kept, canvases=[long], logits=kept.logits[:1])
    )
    result = verify(llada_bundle, "--golden", tmp_path / "long.npz")
    assert (result.exit_code, "has canvases of 300 tokens" in result.output) == (2, True), (
        result.output
    )


def test_verify_with_a_golden_file_needs_no_torch_and_no_onnx(
    llada_bundle: Path, file: Path
) -> None:
    script = "import sys; sys.modules.update(dict.fromkeys(('torch', 'onnx', 'onnx_ir', 'transformers', 'safetensors')))\n"
    script += "from dlm_export.cli import main; main()"
    command = [sys.executable, "-c", script, "verify", str(llada_bundle), "--golden", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Holds at fp32" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give one of --checkpoint and --golden"),
        (("--checkpoint", ".", "--golden", __file__), "give one of --checkpoint and --golden"),
        (("--golden", __file__, "--min-top1", "0.9"), "--min-top1 has no effect with --golden"),
        (("--golden", __file__, "--prompts", __file__), "--prompts has no effect with --golden"),
    ],
)
def test_verify_asks_for_one_reference(
    llada_bundle: Path, arguments: tuple[str, ...], says: str
) -> None:
    result = verify(llada_bundle, *arguments)
    assert (result.exit_code, says in result.output) == (2, True), result.output


# ---- Errors of capture before it needs transformers ----


def capture(checkpoint: Path, *arguments: object, code: int = 2) -> str:
    """Run ``dlm-export capture``, which must fail, and return its output."""
    output = checkpoint.parent / "out.npz"
    result = CliRunner().invoke(
        main, ["capture", str(checkpoint), "-o", str(output), *map(str, arguments)]
    )
    assert result.exit_code == code, result.output
    assert not output.exists()
    return result.output


def test_capture_without_transformers_names_the_extra(
    dream_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version

    def version(name: str, found: str | None = None) -> str:
        if name != "transformers":
            return real(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    assert "transformers, which is not installed: pip install 'dlm-export[capture]'" in capture(
        dream_checkpoint, code=1
    )
    monkeypatch.setattr(metadata, "version", lambda name: version(name, "4.40.2"))
    assert "transformers 4.40.2 is too old; 4.46 or later is needed" in capture(
        dream_checkpoint, code=1
    )


def test_capture_without_trust_names_the_files_and_runs_none(tmp_path: Path) -> None:
    auto_map = {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModel": "modeling_llada.LLaDAModelLM",
    }
    checkpoint = write_checkpoint(tmp_path / "llada", llada_config(auto_map=auto_map))
    trace = "open(__file__ + '.ran', 'w').close()\n"
    (checkpoint / "configuration_llada.py").write_text(trace)
    (checkpoint / "modeling_llada.py").write_text(
        f"{trace}from . import configuration_llada\nfrom .rotary import turn\n"
    )
    (checkpoint / "rotary.py").write_text(f"{trace}from .parts import tables\n")
    (checkpoint / "parts.py").write_text(trace)
    (checkpoint / "unused.py").write_text(trace)
    said = capture(checkpoint)
    assert (
        "would execute its released code: modeling_llada.py, configuration_llada.py, rotary.py, parts.py. Read it"
        in said
    )
    assert "--trust-remote-code" in said
    assert not list(tmp_path.rglob("*.ran"))


AUTO_MAPS: dict[str, tuple[Any, str]] = {
    "code in another repository": (
        "someone/code--modeling.Model",
        "'someone/code--modeling.Model'; only classes in files of",
    ),
    "a path": ("../outside.Model", "only classes in files of the checkpoint's folder"),
    "a list": (["modeling.Model", None], "only classes in files of the checkpoint's folder"),
    "a file that is not there": (
        "modeling_llada.LLaDAModelLM",
        "no such file. auto_map or its code refers to it",
    ),
}


@pytest.mark.parametrize("name", AUTO_MAPS)
def test_code_outside_the_folder_is_refused_whether_trusted_or_not(
    tmp_path: Path, name: str
) -> None:
    entry, says = AUTO_MAPS[name]
    checkpoint = write_checkpoint(tmp_path / "llada", llada_config(auto_map={"AutoModel": entry}))
    assert says in capture(checkpoint)
    assert says in capture(checkpoint, "--trust-remote-code")


def test_capture_of_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "llada", llada_config())
    config = {
        "quantization": {"quant_algo": "FP8"},
        "producer": {"name": "modelopt", "version": "0.47.0"},
    }
    (checkpoint / "hf_quant_config.json").write_text(json.dumps(config))
    assert (
        "is quantised (FP8 (modelopt 0.47.0)); capture the checkpoint it was made from"
        in capture(checkpoint)
    )
