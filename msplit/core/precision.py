"""How exactly a model is computed: one choice, from IEEE float32 to half precision."""

from __future__ import annotations

from enum import StrEnum

from msplit.errors import MsplitError


class Precision(StrEnum):
    """What a model is computed in, from the coarsest to the finest. Inputs, outputs and variables keep their types in each."""

    BF16 = "bf16"
    """What gains from it in bfloat16 (8 bits of mantissa, the range of float32), the rest as in `TF32`."""

    FP16 = "fp16"
    """What gains from it in float16 (11 bits, at most 65504), the rest as in `TF32`."""

    TF32 = "tf32"
    """float32, and its products with operands rounded to TF32 (11 bits, the range of float32), as TensorFlow has it by default."""

    IEEE = "ieee"
    """float32, products included."""

    @property
    def ieee(self) -> bool:
        """Whether products of float32 are in float32."""
        return self is Precision.IEEE

    @property
    def half(self) -> str:
        """The type of half precision, such as ``"bfloat16"``; "" where there is none."""
        return {"bf16": "bfloat16", "fp16": "float16"}.get(self, "")

    @property
    def wide(self) -> Precision:
        """The same with nothing in half precision."""
        return Precision.TF32 if self.half else self

    @property
    def suffix(self) -> str:
        """What the name of what runs in it ends with: nothing where all is float32."""
        return f", {self}" if self.half else ""

    def on(self, *, gpu: bool) -> Precision:
        """What it comes to: a CPU has no TF32."""
        return Precision.IEEE if self is Precision.TF32 and not gpu else self

    @staticmethod
    def read(name: object) -> Precision:
        """The one of this name.

        Raises:
            MsplitError: There is none.
        """
        if name not in list(Precision):
            raise MsplitError(f"there is no precision {name!r}", fix=f"one of: {', '.join(Precision)}")
        return Precision(str(name))

    @staticmethod
    def coarsest(*several: Precision) -> Precision:
        """The one in which least is exact."""
        return min(several, key=list(Precision).index)
