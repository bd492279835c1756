"""Tests of the table of target devices.

The tests check which precisions a device supports, error messages, and on which machines engines
can be built.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlm_calibration.precisions import FORMATS, RECIPES, Recipe
from dlm_export import machine, targets
from dlm_export.cli import main
from dlm_export.engines import RTX
from dlm_export.processors import KERNEL_SETS
from dlm_export.targets import TargetError, check, find, find_all, recipe_for
from dlm_runtime.abi import native as _native

GPUS = [name for name, target in targets.TARGETS.items() if target.sm is not None]

# For each device: SM version; supports INT8 and INT4; supports FP8; supports NVFP4; TensorRT-RTX
# can build its engines ahead of time.
DEVICES = {
    "orin-nano": (87, True, False, False, False),
    "orin-nx": (87, True, False, False, False),
    "agx-orin": (87, True, False, False, False),
    "rtx4090": (89, True, True, False, True),
    "l4": (89, True, True, False, True),
    "l40s": (89, True, True, False, True),
    "h100": (90, True, True, False, False),
    "h200": (90, True, True, False, False),
    "b200": (100, True, True, True, False),
    "b300": (103, True, True, True, False),
    "thor": (110, True, True, True, False),
    "rtx5090": (120, True, True, True, True),
    "rtx-pro-6000": (120, True, True, True, True),
    "gb10": (121, True, True, True, True),
    # GPUs that are not in the table of devices. TensorRT-RTX 1.7 cannot compile INT4 and bf16 for
    # SM 7.5.
    "sm75": (75, False, False, False, True),
    "sm80": (80, True, False, False, True),
    "sm86": (86, True, False, False, True),
}


def refusal(names: Sequence[str], precision: str) -> str:
    with pytest.raises(TargetError) as caught:
        recipe_for(find_all(names), precision)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_runs_what_the_table_of_its_sm_says(name: str) -> None:
    sm, int4, fp8, nvfp4, is_rtx = DEVICES[name]
    target = find(name)
    assert (target.sm, target.engine) == (sm, "tensorrt")
    assert ("rtx" in target.engine_kinds) == is_rtx
    assert "tensorrt" in target.engine_kinds
    runs = {
        precision: precision in target.precisions
        for precision in ("fp16", "bf16", "int8", "int4", "fp8", "nvfp4", "mixed")
    }
    wanted = {"fp16": True, "int8": True, "bf16": name != "sm75", "int4": int4, "fp8": fp8}
    assert runs == wanted | {"nvfp4": nvfp4, "mixed": fp8 and nvfp4}
    assert not {"fp32", "int4-rtn", "int4-awq"} & set(target.precisions)
    assert not {"int8-dynamic", "int4-g32", "int4-g64-dynamic"} & set(target.formats)
    tried = {"nvfp4": nvfp4, "fp8": fp8, "int4-g64": int4, "int8-weight": True}
    assert target.auto == tuple(format for format, has in tried.items() if has)
    assert set(target.auto) <= set(target.formats) <= set(FORMATS)


@pytest.mark.parametrize("name", [*GPUS, "cpu", "cuda", "sm75", "sm120"])
def test_every_listed_precision_is_taken_and_every_other_recipe_refused(name: str) -> None:
    target = find(name)
    for precision in target.precisions:
        recipe = recipe_for([target], precision)
        assert (recipe is None) == (precision in (*target.full_precisions, "auto", "stored"))
    for precision in {*RECIPES, "fp32", "fp16", "bf16"} - set(target.precisions):
        assert f"target {name} does not run" in refusal([name], precision)


@pytest.mark.parametrize(
    ("names", "precision", "recipe"),
    [
        (["cpu"], "int8", "int8"),
        (["cpu"], "int4", "int4"),
        (["cpu"], "int4-g128", "int4-g128-dynamic"),
        (GPUS[:3], "int8", "int8-weight"),
        (["h100", "thor", "sm86"], "int4", "int4-g64"),
        (["gb10"], "int4-g128", "int4-g128"),
        (["cuda"], "int8", "int8-weight"),
        (["cuda"], "int4", "int4-g32"),
        (["rtx5090", "rtx4090"], "fp8", "fp8"),
        (["agx-orin", "orin-nx"], "bf16", None),
    ],
)
def test_targets_share_the_recipe_that_their_engine_runs(
    names: list[str], precision: str, recipe: str | None
) -> None:
    assert recipe_for(find_all(names), precision) == (recipe and RECIPES[recipe])


@pytest.mark.parametrize(
    ("names", "precision", "says"),
    [
        (
            ["h100"],
            "nvfp4",
            "target h100 does not run nvfp4 (NVFP4 needs SM 10.0 or later; h100 is SM 9.0): it runs fp16, bf16, ",
        ),
        (["rtx4090"], "mixed", "does not run nvfp4, which mixed asks for (NVFP4 needs SM 10.0"),
        (["sm75"], "bf16", "sm75 does not run 'bf16' (BF16 needs SM 8.0 or later; sm75 is SM 7.5)"),
        (["sm75"], "int4", "does not run int4-g64, which int4 asks for (INT4 needs SM 8.0"),
        (["thor"], "fp32", "target thor does not run 'fp32' (engines compute in fp16 or bf16)"),
        (
            ["l4"],
            "int4-awq",
            "does not run int4-g32-dynamic, int8-dynamic, which int4-awq asks for (TensorRT has no MatMulInteger",
        ),
        (["cpu"], "bf16", "target cpu does not run 'bf16': it runs fp32, fp16, int8, "),
        (["rtx5090", "rtx4090"], "nvfp4", "target rtx4090 does not run nvfp4 (NVFP4 needs SM 10.0"),
    ],
)
def test_a_precision_that_a_target_lacks_is_refused_with_the_rule(
    names: list[str], precision: str, says: str
) -> None:
    assert says in refusal(names, precision)


def test_a_refusal_for_several_targets_lists_only_what_all_of_them_run() -> None:
    told = refusal(["rtx5090", "rtx4090", "sm86"], "nvfp4").partition(
        "rtx5090, rtx4090, sm86 all run "
    )[2]
    listed = told.replace(" and recipes", ", ").split(", ")
    assert {"fp16", "bf16", "int8", "int4"} <= set(listed)
    assert not {"fp8", "nvfp4", "mixed"} & set(listed)


def test_a_recipe_file_is_checked_like_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[layers]\n"blocks.*.mlp.*" = "int8-dynamic"\n"blocks.*.attention.*" = "fp8"\n')
    told = refusal(["rtx4090"], str(path))
    assert (
        f"does not run int8-dynamic, which {path} asks for (TensorRT has no MatMulInteger" in told
    )
    assert "FP8 needs SM 8.9" in refusal(["agx-orin"], str(path))
    assert recipe_for([find("cpu")], str(path)) is not None


def test_an_fp8_embedding_needs_a_device_with_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        RECIPES, "mine", Recipe("mine", (("blocks.*", "int8-weight"),), embedding="fp8")
    )
    assert recipe_for([find("rtx4090")], "mine") == RECIPES["mine"]
    assert "does not run fp8, which mine asks for (FP8 needs SM 8.9" in refusal(
        ["orin-nano"], "mine"
    )


def test_layers_of_a_bundle_are_checked_by_their_format() -> None:
    layers = {
        "blocks.0.mlp.up": "nvfp4-weight",
        "blocks.0.mlp.down": "fp8",
        "blocks.0.attention.q": "high",
    }
    check([find("thor")], layers.values(), "the bundle")
    with pytest.raises(
        TargetError,
        match=r"l4 does not run nvfp4-weight, which the bundle asks for \(NVFP4 needs SM 10.0",
    ):
        check([find("l4")], layers.values(), "the bundle")
    check([find("l4")], {"blocks.0.mlp.up": "high"}.values(), "the bundle")


def test_any_gpu_goes_by_its_sm() -> None:
    target = find("sm75")
    assert (target.name, target.sm) == ("sm75", 75)
    assert target.description == "any GPU of SM 7.5"
    known = target.memory_bytes, target.bandwidth_bytes_per_s, target.rates, target.sources
    assert known == (None, None, {}, ())


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["cpu", "rtx5090"],
            "targets cpu, rtx5090: a bundle is for cpu, for cuda, or for GPUs by name; build two",
        ),
        (["l4", "thor", "l4"], "target l4 is given more than once"),
        (["sm89", "sm89"], "target sm89 is given more than once"),
        (["l4", "card"], "unknown target 'card'"),
        (["sm70"], "one of cpu, cuda, orin-nano, "),
        ([""], ", gb10, or a compute capability: sm75, "),
        ([], "no target: name at least one of cpu, "),
    ],
)
def test_targets_that_make_no_bundle_are_refused(names: list[str], says: str) -> None:
    with pytest.raises(TargetError) as caught:
        find_all(names)
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


NAMED = "on the device: dlm-export engine BUNDLE --target"


@pytest.mark.parametrize(
    ("modules", "sm", "name", "can", "how"),
    [
        *(
            ({module}, None, "rtx5090", True, "ahead of time by TensorRT-RTX, without a GPU")
            for module in RTX.modules
        ),
        ({RTX.modules[0]}, None, "sm75", True, ""),
        ({RTX.modules[0]}, None, "thor", False, f"{NAMED} thor"),
        ({RTX.modules[0]}, None, "h100", False, ""),
        (set(), None, "l4", False, f"pip install 'dlm-export[rtx]', or {NAMED} l4"),
        (set(), None, "cpu", False, "ONNX Runtime is missing: pip install onnxruntime"),
        # Standard TensorRT builds for the GPU of the machine only.
        ({"tensorrt"}, 90, "h100", True, "by TensorRT, for this machine's GPU"),
        ({"tensorrt"}, 90, "b200", False, ""),
        ({"tensorrt"}, 101, "thor", True, ""),  # Thor's SM version in CUDA 12
        ({"tensorrt"}, None, "h100", False, ""),
    ],
)
def test_where_engines_can_be_built_depends_on_what_is_installed(
    modules: set[str],
    sm: int | None,
    name: str,
    can: bool,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: name if name in modules else None)
    monkeypatch.setattr(machine, "device_sm", lambda: sm)
    found = machine.engine_here(find(name))
    assert (found[0], found[1] if how else how) == (can, how)


def test_asking_what_can_be_built_imports_no_engine() -> None:
    code = (
        "import sys; from dlm_export import machine, targets; "
        "[machine.engine_here(target) for target in targets.TARGETS.values()]; "
        "print([name for name in sys.modules if name.startswith(('tensorrt', 'onnx', 'torch'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("failing", [None, "CDLL", "cuInit", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_the_gpu_at_hand_is_asked_through_libcuda(
    failing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mock of libcuda has a GPU with SM 12.1.

    In some cases, the library is missing, or one of its functions fails.
    """

    class Driver:
        def cuInit(self, flags: int) -> int:
            return int(failing == "cuInit")

        def cuDeviceGet(self, device: object, ordinal: int) -> int:
            return int(failing == "cuDeviceGet")

        def cuDeviceGetAttribute(self, value: object, attribute: int, device: object) -> int:
            value._obj.value = {75: 12, 76: 1}[attribute]  # type: ignore[attr-defined]
            return int(failing == "cuDeviceGetAttribute")

    def load(name: str) -> Driver:
        if failing == "CDLL":
            raise OSError(name)
        return Driver()

    monkeypatch.setattr(machine.ctypes, "CDLL", load)
    assert machine.device_sm() == (121 if failing is None else None)


def test_the_command_tells_machines_everything() -> None:
    told = json.loads(CliRunner().invoke(main, ["targets", "--json"]).stdout)
    assert [target["name"] for target in told["targets"]] == ["cpu", "cuda", *GPUS]
    numbers = (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
    assert told["generic"] == [f"sm{number}" for number in numbers]
    listed = {target["name"]: target for target in told["targets"]}
    rtx = listed["rtx5090"]
    assert rtx["rates"]["nvfp4"] == 1676e12
    assert rtx["memory_bytes"] == 32 * 10**9
    assert rtx["aliases"] == {"int8": "int8-weight", "int4": "int4-g64"}
    assert "nvfp4" in rtx["precisions"]
    assert all(
        isinstance(target["engine_here"], bool) and target["engine_how"]
        for target in told["targets"]
    )
    assert {"processor", "cores", "memory_bytes", "gpu_sm", "onnxruntime"} <= set(
        told["this_machine"]
    )


# ---- Kernels ----


def test_the_command_says_what_cpus_compute_by_and_why_not_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = dict.fromkeys(("amx-int8", "avx512-vnni", "avx-vnni", "avx2"))
    here["amx-int8"] = "the processor has no amx-tile"
    monkeypatch.setattr(_native, "kernel_sets", lambda: here)
    lines = [line.rstrip() for line in CliRunner().invoke(main, ["targets"]).stdout.splitlines()]
    shown = lines[lines.index("Kernels of CPUs") + 1 :]
    rows = {line.split()[0]: " ".join(line.split()) for line in shown[1 : 1 + len(KERNEL_SETS)]}
    assert rows["amx-int8"] == "amx-int8 AMX AVX-512 Sapphire Rapids and later no"
    assert rows["avx-vnni"] == "avx-vnni AVX-VNNI AVX2 Alder Lake, Zen 5 and later yes"
    assert max(map(len, shown)) <= 80
    assert shown[1 + len(KERNEL_SETS) :] == [
        "No amx-int8 here: the processor has no amx-tile",
        "No neon-dotprod here: it is for another architecture",
    ]
    told = json.loads(CliRunner().invoke(main, ["targets", "--json"]).stdout)["kernels"]
    wide = dict.fromkeys(("nvfp4", "attention", "candidates"), "AVX-512")
    assert told[0]["instructions"] == {"int8": "AMX", "int4": "AMX", **wide}
    assert {known["name"]: known["refusal"] for known in told} == {
        **here,
        "neon-dotprod": "it is for another architecture",
    }


def test_every_set_of_native_kernels_is_described_in_its_order() -> None:
    described = [known.name for known in KERNEL_SETS]
    native = list(_native.kernel_sets())
    assert native
    assert [name for name in described if name in native] == native
