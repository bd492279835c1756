"""Facts about a Jetson: model, Jetson Linux and JetPack, power mode, as in NVIDIA's Jetson Linux
Developer Guide (https://docs.nvidia.com/jetson/archives/r36.4/DeveloperGuide/, "Platform Power and
Performance").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dlm_export.doctor.system import System

# Device tree strings end with NUL. The first path is a link to the second; a container may have
# only one of them.
MODEL_FILES = ("/proc/device-tree/model", "/sys/firmware/devicetree/base/model")
NAME_LIMIT = 100  # characters of a name that are shown
SM_BY_MODEL = {"Thor": 110, "Orin": 87}
JETPACK_BY_RELEASE = {35: "5", 36: "6", 38: "7", 39: "7"}


@dataclass(frozen=True)
class Board:
    """A Jetson; ``None`` means unknown.

    ``linux`` is the release of Jetson Linux (36.4.3). ``jetpack`` is the version of the package
    nvidia-jetpack, or the major version for that release. ``sm`` follows from the model.
    ``power_mode`` comes from nvpmodel, such as MAXN.
    """

    model: str
    sm: int | None
    linux: str | None
    jetpack: str | None
    power_mode: str | None


def find_board(system: System) -> Board | None:
    """This machine as a Jetson, or ``None`` if it is not one."""
    model = next(filter(None, (_name(system.text(path) or "") for path in MODEL_FILES)), "")
    release = re.search(
        r"^# R(\d{1,4}) \(release\), REVISION: ([\d.]{1,20})",
        system.text("/etc/nv_tegra_release") or "",
    )
    if "Jetson" not in model and release is None:
        return None
    linux = None if release is None else f"{release[1]}.{release[2]}"
    return Board(
        model or "a Jetson without a name in its device tree",
        next((sm for word, sm in SM_BY_MODEL.items() if word in model), None),
        linux,
        _jetpack(system) or (None if release is None else JETPACK_BY_RELEASE.get(int(release[1]))),
        _power_mode(system),
    )


def _name(text: str) -> str:
    """The text as one printable line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * NAME_LIMIT]).split())[
        :NAME_LIMIT
    ]


def _jetpack(system: System) -> str | None:
    """The version of JetPack's meta-package; many boards do not have it."""
    found = re.match(
        r"[\d.]{1,20}", system.program("dpkg-query", "-W", "-f=${Version}", "nvidia-jetpack") or ""
    )
    return None if found is None else found[0]


def _power_mode(system: System) -> str | None:
    found = re.search(r"NV Power Mode: *(\S+)", system.program("nvpmodel", "-q") or "")
    return None if found is None else _name(found[1])
