"""Lists the GPUs that can be build targets by name, with their published specifications.

To add a device, add a ``Device`` to ``DEVICES``. A new compute capability (SM) also needs an entry
in ``TENSORRT_BY_SM``. If a vendor states a memory size in GB, this module assumes that a GB has
10**9 bytes. Drivers report at least this size. All compute rates are for dense matrices. If a vendor
publishes only the rate for sparse matrices, the ``Device`` contains half of the published rate, and
a comment says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """One GPU model. A value that no source states is ``None``, or is missing from a mapping.

    - ``sm``: the compute capability times 10. 89 means 8.9.
    - ``is_shared``: true if CPU and GPU use the same memory.
    - ``tera``: peak rates in 10**12 operations per second. The keys are fp16, int8, int4, fp8 and
      nvfp4.
    - ``derived``: explains, for each rate that no source states directly, how it was derived.
    """

    name: str
    sm: int
    description: str
    sources: tuple[str, ...] = ()
    gb: int | None = None
    gb_per_s: float | None = None
    is_shared: bool = False
    tera: Mapping[str, float] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


_BLOG = "https://developer.nvidia.com/blog"
_PRODUCTS = "https://www.nvidia.com/en-us"
_JETSON_ORIN = f"{_PRODUCTS}/autonomous-machines/embedded-systems/jetson-orin/"
_NANO_SUPER = f"{_BLOG}/nvidia-jetson-orin-nano-developer-kit-gets-a-super-boost/"
_NX_SUPER = f"{_BLOG}/nvidia-jetpack-6-2-brings-super-mode-to-nvidia-jetson-orin-nano-and-jetson-orin-nx-modules/"
_ORIN_BRIEF = "https://www.nvidia.com/content/dam/en-zz/Solutions/gtcf21/jetson-orin/nvidia-jetson-agx-orin-technical-brief.pdf"
_ORIN_DLA = "https://github.com/NVIDIA/Deep-Learning-Accelerator-SW"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_HOPPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_HGX = f"{_PRODUCTS}/data-center/hgx/"
_HGX_PARTS = "https://docs.nvidia.com/enterprise-reference-architectures/hgx-ai-factory/latest/components.html"
_THOR = f"{_BLOG}/introducing-nvidia-jetson-thor-the-ultimate-platform-for-physical-ai/"
_BLACKWELL = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_BLACKWELL_PRO = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/"
    "NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf"
)

DEVICES = (
    Device(
        "orin-nano",
        87,
        "Jetson Orin Nano 8 GB, MAXN_SUPER",
        sources=(_NANO_SUPER,),
        gb=8,
        gb_per_s=102,
        is_shared=True,
        tera={"fp16": 17, "int8": 33},
    ),
    # NVIDIA publishes 157 sparse TOPS for the GPU and the two deep learning accelerators together.
    # dlm-export's engines do not use these accelerators, and no NVIDIA page states the rate of the
    # GPU alone, so ``tera`` contains no rates.
    Device(
        "orin-nx",
        87,
        "Jetson Orin NX 16 GB",
        sources=(_JETSON_ORIN, _NX_SUPER),
        gb=16,
        gb_per_s=102.4,
        is_shared=True,
    ),
    # NVIDIA publishes a sparse int8 rate of 275 TOPS at MAXN for the whole module. The GPU's part
    # is 171 TOPS, which the source (a technical brief) rounds to 170. The dense rate is half of the
    # sparse rate. For fp16, the brief says that a tensor core computes 16 fp16 products in the time
    # of 32 int8 products. The Orin Nano's two rates have the same ratio of 1 to 2.
    Device(
        "agx-orin",
        87,
        "Jetson AGX Orin 64 GB, MAXN",
        sources=(_JETSON_ORIN, _ORIN_BRIEF, _ORIN_DLA),
        gb=64,
        gb_per_s=204.8,
        is_shared=True,
        tera={"fp16": 171 / 4, "int8": 171 / 2},
        derived={
            "fp16": "half of int8's: an Ampere tensor core computes half as many fp16 products"
        },
    ),
    Device(
        "rtx4090",
        89,
        "GeForce RTX 4090",
        sources=(_ADA,),
        gb=24,
        gb_per_s=1008,
        tera={"fp16": 165.2, "int8": 660.6, "int4": 1321.2, "fp8": 330.3},
    ),
    # The source gives rates for sparse matrices, so ``tera`` contains half of these rates.
    Device(
        "l4",
        89,
        "L4",
        sources=(f"{_PRODUCTS}/data-center/l4/",),
        gb=24,
        gb_per_s=300,
        tera={"fp16": 242 / 2, "int8": 485 / 2, "fp8": 485 / 2},
    ),
    Device(
        "l40s",
        89,
        "L40S",
        sources=(f"{_PRODUCTS}/data-center/l40s/",),
        gb=48,
        gb_per_s=864,
        tera={"fp16": 362.05, "int8": 733, "fp8": 733},
    ),
    Device(
        "h100",
        90,
        "H100 SXM 80 GB",
        sources=(_HOPPER, f"{_PRODUCTS}/data-center/h100/"),
        gb=80,
        gb_per_s=3350,
        tera={"fp16": 989.4, "int8": 1978.9, "fp8": 1978.9},
    ),
    # The source gives rates for sparse matrices, so ``tera`` contains half of these rates.
    Device(
        "h200",
        90,
        "H200 SXM 141 GB",
        sources=(f"{_PRODUCTS}/data-center/h200/",),
        gb=141,
        gb_per_s=4800,
        tera={"fp16": 1979 / 2, "int8": 3958 / 2, "fp8": 3958 / 2},
    ),
    # The source gives rates for eight GPUs together. The nvfp4 rate is dense, and all other rates
    # are sparse.
    Device(
        "b200",
        100,
        "B200 SXM 180 GB",
        sources=(f"{_PRODUCTS}/data-center/dgx-b200/", _HGX),
        gb=180,
        gb_per_s=64000 / 8,
        tera={"fp16": 36000 / 16, "int8": 72000 / 16, "fp8": 72000 / 16, "nvfp4": 72000 / 8},
    ),
    # The source gives rates for eight GPUs together. The nvfp4 rate is dense, and all other rates
    # are sparse. Eight GPUs have 8 * 288 GB of memory, but programs can use only 2.1 TB of it.
    Device(
        "b300",
        103,
        "B300 SXM",
        sources=(_HGX, _HGX_PARTS),
        gb=262,
        gb_per_s=8000,
        tera={"fp16": 36000 / 16, "int8": 3000 / 16, "fp8": 72000 / 16, "nvfp4": 108000 / 8},
        note="hardly any INT8 arithmetic: int8-static is slow, int8 (weights only) is not",
    ),
    # The source gives rates for sparse fp16 and int8 matrices, so ``tera`` contains half of them.
    Device(
        "thor",
        110,
        "Jetson AGX Thor, T5000 128 GB",
        sources=(_THOR,),
        gb=128,
        gb_per_s=273,
        is_shared=True,
        tera={"fp16": 517 / 2, "int8": 1035 / 2, "fp8": 517, "nvfp4": 1035},
    ),
    Device(
        "rtx5090",
        120,
        "GeForce RTX 5090",
        sources=(_BLACKWELL,),
        gb=32,
        gb_per_s=1792,
        tera={"fp16": 209.5, "int8": 838, "fp8": 419, "nvfp4": 1676},
    ),
    Device(
        "rtx-pro-6000",
        120,
        "RTX PRO 6000 Blackwell, Workstation Edition",
        sources=(_BLACKWELL_PRO,),
        gb=96,
        gb_per_s=1792,
        tera={"fp16": 503.8, "int8": 1007.6, "fp8": 1007.6, "nvfp4": 2015.2},
    ),
    # The source gives a sparse rate for nvfp4. No page states the rates for other formats.
    Device(
        "gb10",
        121,
        "GB10, DGX Spark",
        sources=(f"{_PRODUCTS}/products/workstations/dgx-spark/",),
        gb=128,
        gb_per_s=273,
        is_shared=True,
        tera={"nvfp4": 1000 / 2},
    ),
)

# SMs for which TensorRT-RTX 1.7 can build engines without a GPU. TensorRT-RTX lists them in its
# enumeration ComputeCapability.
RTX_SM = (75, 80, 86, 89, 120, 121)
# Maps each SM that a user can name as a target (for example sm89) to the versions of standard
# TensorRT that support it. According to the release notes, Blackwell and FP4 are supported since
# 10.8. GB300, DGX B300 and DGX Spark are supported since 10.14
# (https://docs.nvidia.com/deeplearning/tensorrt/10.14.1/index.html). Thor is supported since
# JetPack 7. On Orin, JetPack 6.0 has TensorRT 8.6, which cannot parse our graphs, JetPack 6.1 and 6.2
# have TensorRT 10.3, and JetPack 7.2 has TensorRT 10.16.
_MOE = "11 or later for experts in fp16 or bf16"
TENSORRT_BY_SM = {
    75: "10.14 or later",
    80: "10.14 or later",
    86: "10.14 or later",
    87: "10.3 (JetPack 6.1 and 6.2), 10.16 (JetPack 7.2)",
    89: "10.14 or later",
    90: "10.14 or later",
    100: f"10.14 or later, {_MOE}",
    103: f"10.14 or later, {_MOE}",
    110: f"10.14 or later, {_MOE} (with 10.13 of JetPack 7.0, a bundle built with --plain-graph)",
    120: "10.14 or later",
    121: "10.14 or later",
}
JETPACK_BY_SM = {87: "6.1 and 6.2, or 7.2 and later", 110: "7"}
