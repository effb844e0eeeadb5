"""What a piece of code launches on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import torch


def device_launches(function: Callable[[], object]) -> list[str]:
    """Names of the kernels, copies and memsets that `function` launches, in order.

    Waits for the device. Run `function` once before: first calls load kernels and fill caches.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    on_device = [
        event
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        # Some versions list waits beside what is launched.
        and not event.name.endswith(("Sync", "Wait Event"))
    ]
    return [event.name for event in sorted(on_device, key=lambda event: event.time_range.start)]
