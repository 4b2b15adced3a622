"""Host arrays on the device, whichever that is."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor with the array's content. To a GPU through page-locked memory: a copy from ordinary memory waits for all
    work that is queued on the stream, and the host stops running ahead of the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
