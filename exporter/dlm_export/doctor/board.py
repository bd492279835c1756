"""Collects facts about a Jetson: the model, Jetson Linux, JetPack and the power mode.

The source is NVIDIA's Jetson Linux Developer Guide, "Platform Power and Performance"
(https://docs.nvidia.com/jetson/archives/r36.4/DeveloperGuide/).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dlm_export.doctor.system import System

# On a Jetson, the first path is a link to the second path. In a container, one of the paths may be
# missing. The text in the file ends with a NUL character.
MODEL_FILES = ("/proc/device-tree/model", "/sys/firmware/devicetree/base/model")
NAME_LIMIT = 100  # maximum number of characters in a name; longer names are cut off
SM_BY_MODEL = {"Thor": 110, "Orin": 87}
JETPACK_BY_RELEASE = {35: "5", 36: "6", 38: "7", 39: "7"}


@dataclass(frozen=True)
class Board:
    """Facts about a Jetson board. ``None`` means unknown.

    - ``sm``: the SM version (compute capability) of the GPU, derived from ``model``.
    - ``linux``: the release of Jetson Linux, such as 36.4.3.
    - ``jetpack``: the version of the package nvidia-jetpack. If this package is not installed,
      ``jetpack`` is the major version of JetPack that belongs to the release of Jetson Linux.
    - ``power_mode``: the power mode that nvpmodel reports, such as MAXN.
    """

    model: str
    sm: int | None
    linux: str | None
    jetpack: str | None
    power_mode: str | None

    @property
    def has_old_tensorrt(self) -> bool:
        """True for JetPack 6.0 and older (Jetson Linux before 36.4), whose TensorRT is before 10."""
        found = re.match(r"(\d+)\.(\d+)", self.linux or "")
        return found is not None and (int(found[1]), int(found[2])) < (36, 4)


def find_board(system: System) -> Board | None:
    """Return the facts about this Jetson, or ``None`` if this machine is not a Jetson."""
    model = next(filter(None, (_name(system.text(path) or "") for path in MODEL_FILES)), "")
    release = re.search(
        r"^# R(\d{1,4}) \(release\), REVISION: ([\d.]{1,20})",
        system.text("/etc/nv_tegra_release") or "",
    )
    if "Jetson" not in model and release is None:
        return None
    linux = None if release is None else f"{release[1]}.{release[2]}"
    mode = re.search(r"NV Power Mode: *(\S+)", system.program("nvpmodel", "-q") or "")
    return Board(
        model or "a Jetson without a name in its device tree",
        next((sm for word, sm in SM_BY_MODEL.items() if word in model), None),
        linux,
        _jetpack(system) or (None if release is None else JETPACK_BY_RELEASE.get(int(release[1]))),
        None if mode is None else _name(mode[1]),
    )


def _name(text: str) -> str:
    """Turn ``text`` into one short line without unprintable characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * NAME_LIMIT]).split())[
        :NAME_LIMIT
    ]


def _jetpack(system: System) -> str | None:
    """Return the version of the package nvidia-jetpack, or ``None`` if it is not installed."""
    found = re.match(
        r"[\d.]{1,20}", system.program("dpkg-query", "-W", "-f=${Version}", "nvidia-jetpack") or ""
    )
    return None if found is None else found[0]
