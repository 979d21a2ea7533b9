"""What there is once per GPU, and the one object that owns it."""

from msplit.engines.cuda.device.device import Device

__all__ = ["Device"]
