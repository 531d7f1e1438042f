"""The matrices of a .gguf model that a GPU keeps in their blocks, and what the model takes there. Torch-free.

All matrices in blocks stay as they are, except embedding tables, of which a token reads one row, and a head that no
kernel reads. The table of a model without an output head of its own is its head as well, which stays in blocks beside
it. Matrices in MXFP4, and the stacks of experts of gpt-oss in it, are put into the order of `formats.mxfp4`, which has
kernels; stacks in other types become 16 bit.
"""

from __future__ import annotations

import math

from localq.files.gguf.block_types import BLOCK_TYPES, FAST_TYPES, WITH_FACTORS, BlockType, by_name, has_kernel
from localq.files.gguf.directory import GgufTensor
from localq.files.gguf.layout import StoredLayout
from localq.files.gguf.reader import GgufModel
from localq.files.schemes import MIX

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INPUT_TABLE = "model.embed_tokens_per_layer.weight"
# Small, and read by kernels that take 16 bit: routers and gates, the convolution and the heads' rates of a delta net.
_IN_16_BIT = (
    "mlp.gate.weight", "block_sparse_moe.gate.weight", "router.weight", "shared_expert_gate.weight", "conv1d.weight",
    "in_proj_a.weight", "in_proj_b.weight", "router.proj.weight", "feed_forward.gate.weight", "conv.conv.weight",
    "mixer.gate.weight", "router.layer.weight",
)  # fmt: skip
MXFP4_COLUMNS = 64  # rows that the kernels of MXFP4 read are whole numbers of them
WORD = 8  # columns that move together: the least run of columns in another order


def packed_matrices(model: GgufModel) -> dict[str, GgufTensor]:
    """Hugging Face name of each matrix that stays in blocks -> its tensor; the head is there for a tied model too.

    Without those of `mxfp4_tensors`.
    """
    outside = {TABLE, INPUT_TABLE, HEAD, *mxfp4_tensors(model)}
    found = {name: each for name, each in model.tensors.items() if name not in outside and _stays_packed(name, each)}
    head = model.tensors.get(HEAD, model.tensors.get(TABLE))
    if head is not None and _stays_packed(HEAD, head) and has_kernel(BLOCK_TYPES[head.type].name, head.shape[0]):
        found[HEAD] = head
    return found


def mxfp4_tensors(model: GgufModel) -> dict[str, GgufTensor]:
    """Hugging Face name of each matrix and stack of experts that its kernels read in MXFP4 -> its tensor."""
    return {
        name: each
        for name, each in model.tensors.items()
        if name not in (TABLE, INPUT_TABLE, HEAD) and _is_mxfp4(name, each)
    }


def block_type(tensor: GgufTensor) -> BlockType | None:
    """The type of its blocks; None for an unknown one."""
    return BLOCK_TYPES.get(tensor.type)


def blocks_shape(tensor: GgufTensor) -> tuple[int, int]:
    """[rows, bytes of a row] of a matrix in blocks."""
    kind = BLOCK_TYPES[tensor.type]
    return tensor.shape[0], tensor.shape[1] // kind.values * kind.bytes


def device_bytes(model: GgufModel) -> int:
    """Bytes on a GPU of all weights but embedding and head: matrices as stored, all others in 16 bit."""
    packed, in_mxfp4 = packed_matrices(model), mxfp4_tensors(model)
    total = 0
    for name, tensor in model.tensors.items():
        if name in (TABLE, INPUT_TABLE, HEAD):
            continue
        if name in in_mxfp4:
            total += _mxfp4_bytes(tensor)
        else:
            total += _packed_bytes(tensor) if name in packed else 2 * math.prod(tensor.shape)
    return total


def head_bytes(model: GgufModel) -> int:
    """Bytes on a GPU of the head in blocks; 0 for a head in 16 bit."""
    head = packed_matrices(model).get(HEAD)
    return 0 if head is None else _packed_bytes(head)


def scheme(model: GgufModel) -> str:
    """The type of all matrices in blocks but the head, "mix" and their bits per weight for several, "" for none.

    Types without kernels follow a mixture: "mix2.06, Q1_0".
    """
    blocks, in_mxfp4 = [each for name, each in packed_matrices(model).items() if name != HEAD], mxfp4_tensors(model)
    names = {BLOCK_TYPES[each.type].name for each in (*blocks, *in_mxfp4.values())}
    if len(names) < 2:
        return names.pop() if names else ""
    weights = sum(math.prod(each.shape) for each in (*blocks, *in_mxfp4.values()))
    size = sum(_packed_bytes(each) for each in blocks) + sum(_mxfp4_bytes(each) for each in in_mxfp4.values())
    return ", ".join((f"{MIX}{8 * size / weights:.2f}", *sorted(names - FAST_TYPES)))


def _packed_bytes(tensor: GgufTensor) -> int:
    places = 0 if tensor.layout.columns is None else 2 * (tensor.shape[1] // WORD)
    return math.prod(blocks_shape(tensor)) + places


def _mxfp4_bytes(tensor: GgufTensor) -> int:
    kind = BLOCK_TYPES[tensor.type]
    return math.prod(tensor.shape) // kind.values * kind.bytes


def _is_mxfp4(name: str, tensor: GgufTensor) -> bool:
    is_stack = len(tensor.shape) == 3 and tensor.transposed
    is_matrix = not is_stack and _stays_packed(name, tensor) and tensor.layout.columns is None
    if {block_type(part) for part in tensor.parts or (tensor,)} != {by_name("MXFP4")} or not (is_stack or is_matrix):
        return False
    return tensor.stored_shape[-1] % MXFP4_COLUMNS == 0 and tensor.scale is None


def _stays_packed(name: str, tensor: GgufTensor) -> bool:
    kind = block_type(tensor)
    matrix = len(tensor.shape) == 2 and not tensor.parts and not tensor.transposed and name.endswith(".weight")
    is_linear = matrix and not name.endswith(_IN_16_BIT)
    has_factor = tensor.scale is not None
    takes_it = not has_factor or (kind is not None and kind.name == WITH_FACTORS)
    return kind is not None and kind.is_quantized and is_linear and takes_it and _moves_whole_words(tensor.layout)


def _moves_whole_words(layout: StoredLayout) -> bool:
    """Return whether stored values are those of Hugging Face, columns moved only in multiples of `WORD`."""
    columns = layout.columns
    in_words = columns is None or (columns.inner % WORD == 0 and columns.keep % WORD == 0)
    return in_words and not layout.add and not layout.negated_exp
