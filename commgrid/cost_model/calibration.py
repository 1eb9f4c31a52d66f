"""The numbers of the step's model that no formula gives: each with its source or calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

NCCL_GB = (0.4, 0.7)
"""Device memory reported for one connected NCCL communicator: 388 MiB to 688 MB on A100."""
RESERVED_GB = 2.0
"""Of the CUDA context and libraries' workspaces: what a process holds that has done nothing yet."""


@dataclass(frozen=True)
class Calibration:
    """Constants of the step's model; `SOURCES` says where each is from.

    Args:
        gemm: share of a device's peak that a matrix product reaches which memory does not limit,
            by the device's name.
        gemm_other: the same for devices that no run was calibrated on.
        flash: share of the peak that attention in one kernel reaches.
        memory: share of the device's memory bandwidth that element-wise kernels reach.
        network: share of a link's bandwidth that collectives reach, where a datasheet gives it.
    """

    gemm: tuple[tuple[str, float], ...] = (("A100-80GB", 0.687), ("H100-80GB", 0.605))
    gemm_other: float = 0.605
    flash: float = 0.5
    memory: float = 0.8
    network: float = 0.8

    def gemm_share(self, device: str) -> float:
        """Of a device, by its name."""
        return dict(self.gemm).get(device, self.gemm_other)


CALIBRATION = Calibration()

_RUNS = (
    "calibrated on published runs, so that their mean error is none: 1.7, 18.4, 145.6 and 1008 "
    "billion parameters of Narayanan et al. 2021 and 530 of Korthikanti et al. 2022 for A100; "
    "Llama 3 405B on 16,384 GPUs and Nemotron-4 340B on 3,072 for H100 (docs/choosing.md)"
)

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "gemm": _RUNS,
        "gemm_other": "H100's: no run on this device was calibrated on",
        "flash": "Dao 2023, arXiv 2307.08691, and Shah et al. 2024, arXiv 2407.08608: forward and "
        "backward with causal mask reach 0.35 to 0.7 of the peak at these lengths",
        "memory": "what plain copies reach on A100 and H100: 0.8 to 0.9 of the datasheet's",
        "network": "nccl-tests on DGX A100 and H100 report about 0.8 of NVLink's bandwidth; a "
        "measured cluster is not discounted",
        "nccl": "reported: 388 MiB to 688 MB of device memory for a connected communicator on A100",
        "reserved": "a CUDA context with loaded kernels and the libraries' workspaces",
    }
)
"""Where each constant is from."""
