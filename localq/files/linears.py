"""Matrices of decoder blocks that formats may quantize. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

INPUTS = (  # names of Linears that read the residual stream
    "q_proj", "q_a_proj", "kv_a_proj_with_mqa", "k_proj", "v_proj", "qkv_proj", "in_proj_qkv", "in_proj_z", "in_proj",
    "gate_proj", "up_proj", "input_linear", "gate_up_proj", "w1", "w3", "lm_head",
)  # fmt: skip


@dataclass(frozen=True)
class Linears:
    """`count` matrices of one shape [rows, columns] = [out, in]; `expert`: a token uses only some of them."""

    name: str
    rows: int
    columns: int
    count: int
    expert: bool = False

    @property
    def parameters(self) -> int:
        """Weights of all `count` matrices."""
        return self.rows * self.columns * self.count
