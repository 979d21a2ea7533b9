"""Resources that exist once per GPU, and the one object that owns them."""

from msplit.engines.cuda.device.device import Device

__all__ = ["Device"]
