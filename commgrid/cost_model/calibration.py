"""The numbers of the step's model that no formula gives: each with its source or calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

RESERVED_GB = 2.0
"""Of the CUDA context and libraries' workspaces: what a process holds that has done nothing yet."""


@dataclass(frozen=True)
class Calibration:
    """Constants of the step's model; `SOURCES` says where each is from.

    Args:
        gemm: share of a device's peak that a matrix product reaches which memory does not limit,
            by the device's name.
        gemm_other: the same for devices that no run was calibrated on.
        fp8: share of that which products in 8 bits reach of their higher peak.
        flash, flash_compiled: share of the peak in 16 bits that attention in one kernel reaches, a
            library's and PyTorch's own.
        memory: share of the device's memory bandwidth that element-wise kernels reach.
        eager, compiled: times that these take where no library has fused them.
        network: share of a link's bandwidth that collectives reach, where a datasheet gives it.
        kernel: seconds that a kernel takes at the least.
        host: seconds of a layer's forward with experts at the least, where the host has to learn
            how many rows go to each rank; a backward takes twice that.
    """

    gemm: tuple[tuple[str, float], ...] = (
        ("A100-80GB", 0.674), ("H100-80GB", 0.561), ("H100-96GB", 0.525), ("B200-180GB", 0.606),
        ("GB200-186GB", 0.55), ("GB300-279GB", 0.68),
    )  # fmt: skip
    gemm_other: float = 0.58
    fp8: float = 0.9
    flash: float = 0.5
    flash_compiled: float = 0.27
    memory: float = 0.68
    eager: float = 4.4
    compiled: float = 1.9
    network: float = 0.8
    kernel: float = 4e-6
    host: float = 2.8e-3

    def gemm_share(self, device: str) -> float:
        """Of a device, by its name."""
        return dict(self.gemm).get(device, self.gemm_other)

    def flash_share(self, kernels: str) -> float:
        """Of the peak, by who wrote the kernels."""
        return self.flash if kernels == "fused" else self.flash_compiled

    def elementwise(self, kernels: str) -> float:
        """Times that the kernels around the products take, by who wrote them."""
        return {"eager": self.eager, "compiled": self.compiled}.get(kernels, 1.0)


CALIBRATION = Calibration()

_RUNS = "calibrated on half of the published runs, drawn by a fixed seed (docs/choosing.md)"

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "gemm": _RUNS,
        "gemm_other": "the mean of other devices': no run on this device was calibrated on",
        "fp8": _RUNS,
        "flash": "Dao 2023, arXiv 2307.08691, and Shah et al. 2024, arXiv 2407.08608: forward and "
        "backward with causal mask reach 0.35 to 0.7 of the peak at these lengths",
        "flash_compiled": _RUNS,
        "memory": _RUNS,
        "eager": _RUNS,
        "compiled": _RUNS,
        "kernel": "an empty CUDA kernel takes 2 to 5 microseconds from launch to end",
        "host": _RUNS,
        "network": "nccl-tests on DGX A100 and H100 report about 0.8 of NVLink's bandwidth; a "
        "measured cluster is not discounted",
        "nccl": "reported: 388 MiB to 688 MB of device memory for a connected communicator on A100",
        "reserved": "a CUDA context with loaded kernels and the libraries' workspaces",
    }
)
"""Where each constant is from."""
