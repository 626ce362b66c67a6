"""The GPUs a plan can be made for.  Imports without torch."""

from dataclasses import dataclass

from perilune.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class Gpu:
    """One GPU in a server of eight: what its maker's data sheet says, SXM form, without sparsity."""

    memory: float
    """Bytes."""
    peak: float
    """bfloat16 products, FLOP/s."""
    float32: float
    """float32 products outside the tensor cores, FLOP/s."""
    bandwidth: float
    """Of its memory, bytes/s."""
    link: float
    """To the other GPUs of its server, bytes/s each way (NVLink)."""
    network: float
    """To other servers, bytes/s each way: its share of the server's network cards."""
    watts: float
    """At most, of the GPU alone."""
    server_watts: float
    """Its eighth of what the server draws at most."""


SERVER = 8  # GPUs
GPUS = {
    # NVIDIA A100 data sheet (80 GB SXM); DGX A100: 6.5 kW, eight 200 Gb/s ports
    "a100-80g": Gpu(80e9, 312e12, 19.5e12, 2.039e12, 300e9, 25e9, 400, 6500 / 8),
    # NVIDIA H100 data sheet (SXM): half of what it gives with sparsity; DGX H100: 10.2 kW, eight 400 Gb/s ports
    "h100": Gpu(80e9, 989e12, 67e12, 3.35e12, 450e9, 50e9, 700, 10200 / 8),
    # NVIDIA H200 data sheet (SXM), the same; DGX H200 as DGX H100
    "h200": Gpu(141e9, 989e12, 67e12, 4.8e12, 450e9, 50e9, 700, 10200 / 8),
    # NVIDIA DGX B200 data sheet, an eighth: 1,440 GB, 64 TB/s, 14.4 TB/s of NVLink both ways; 14.3 kW, 400 Gb/s ports
    "b200": Gpu(180e9, 2250e12, 75e12, 8e12, 900e9, 50e9, 1000, 14300 / 8),
}


def gpu_called(name: str) -> Gpu:
    """The GPU of that name; ConfigError if there is none."""
    if name not in GPUS:
        raise ConfigError(f"--gpu: there is none called {name!r}; {nearest(name, GPUS)}")
    return GPUS[name]
