"""Stand-ins for the packages `aqlm` and `vptq`, whose products take what those packages' sources declare.

aqlm: `inference_kernels.get_forward_pass_kernel`. vptq: `libvptq.quant_gemv` with the arguments, in this order, of
`wquant_act16_gemv` in csrc/quant_gemv.cu of its release 0.0.5.post1, and what that refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from localq.formats.codebooks import aqlm
from localq.formats.vptq import codec as vptq_codec


def modules(broken: Callable[[Tensor], Tensor] = lambda result: result) -> list[ModuleType]:
    """Modules under their names; `broken` is done to each result."""

    def forward(x, codes, codebooks, scales, bias):
        assert bias is None
        return broken(x.float() @ aqlm.dequantize(aqlm.Packed(codes, codebooks, scales), torch.float32).T).to(x.dtype)

    def quant_gemv(
        input, q_indice, centroids, q_indice_residual, residual_centroids, q_indice_outliers, outliers_centroids,
        invperm, weight_scale, weight_bias, bias, in_features, out_features,
    ):  # fmt: skip
        assert input.numel() // in_features < 3
        assert input.shape[-1] == in_features > 256
        assert (q_indice.dtype, invperm.dtype) == (torch.int32, torch.int16)
        assert all(each.is_contiguous() for each in (input, q_indice, centroids, invperm))
        assert all(each is None for each in (q_indice_residual, q_indice_outliers, outliers_centroids, bias))
        places = torch.argsort(invperm.int() & 0xFFFF).to(torch.int16)  # its name for the column of each place
        packed = vptq_codec.Packed(
            q_indice, centroids, None, residual_centroids, None, None, places, weight_scale, weight_bias,
            (out_features, in_features),
        )  # fmt: skip
        return broken(input.float() @ vptq_codec.dequantize(packed, torch.float32).T).to(input.dtype)

    kernels, package = ModuleType("aqlm.inference_kernels"), ModuleType("vptq")
    kernels.get_forward_pass_kernel = lambda codebooks, optimize_for_training: forward
    package.libvptq = ModuleType("vptq.libvptq")
    package.libvptq.quant_gemv = quant_gemv
    return [ModuleType("aqlm"), kernels, package]
