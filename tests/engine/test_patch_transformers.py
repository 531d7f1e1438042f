"""`patch`: our kernels under bitsandbytes' modules give its results; weights stay as they are; refusals have names."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from localq.engine import patch_transformers
from localq.engine.patch_transformers import matrix_of, patch, unpatch, why_not_readable
from localq.errors import LocalqError
from localq.formats import nf4

bitsandbytes = pytest.importorskip("bitsandbytes")


def linear(shape=(96, 192), bias=False, dtype=torch.float16, device="cuda", **options) -> nn.Module:
    """A Linear4bit over random weights with outliers; on a GPU it is quantized."""
    options = {"quant_type": "nf4", "compress_statistics": True, "compute_dtype": dtype, **options}
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    weight[:, 3::41] *= 10
    module = bitsandbytes.nn.Linear4bit(shape[1], shape[0], bias=bias, **options)
    kept = {key: options[key] for key in ("quant_type", "compress_statistics")}
    kept |= {key: options[key] for key in ("quant_storage",) if key in options}
    module.weight = bitsandbytes.nn.Params4bit(weight.to(dtype), requires_grad=False, module=module, **kept)
    if bias:
        module.bias = nn.Parameter(torch.randn(shape[0], generator=generator).to(dtype), requires_grad=False)
    return module.to(device)


def inputs(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))
    x[..., 7::61] *= 20
    return x.to(dtype).cuda()


def dense(module: nn.Module) -> torch.Tensor:
    return bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state).float()


CASES = {
    "nested": {},
    "plain": {"compress_statistics": False},
    "bias": {"bias": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "codes kept as bfloat16": {"quant_storage": torch.bfloat16, "bias": True},
    "odd sizes": {"shape": (1001, 576)},
}


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [(1, 1), (1, 8), (3, 3), (2, 40)], ids=str)
def test_results_are_as_good_as_a_16_bit_product(case, rows):
    module = linear(**CASES[case])
    dtype = module.compute_dtype
    x, weight, bias = inputs(*rows, module.in_features, dtype=dtype), dense(module), module.bias
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    naive = nn.functional.linear(x, weight.to(dtype), bias)
    assert patch(module) == 1
    got = module(x)
    assert got.dtype == dtype
    assert got.shape == naive.shape
    error, naive_error = ((each.double() - exact).abs().max() for each in (got, naive))
    assert error <= 2 * naive_error + 1e-6 * exact.abs().max()


@pytest.mark.cuda
def test_weights_are_neither_copied_nor_written_and_unpatch_restores():
    module, x = linear(bias=True), inputs(2, 5, 192)
    before, codes, address = module(x), module.weight.data.clone(), module.weight.data_ptr()
    held = torch.cuda.memory_allocated()
    assert patch(module) == 1
    assert patch(module) == 1
    assert torch.cuda.memory_allocated() == held
    module(x)
    assert module.weight.data_ptr() == address
    assert torch.equal(module.weight.data, codes)
    assert unpatch(module) == 1
    assert "forward" not in vars(module)
    assert torch.equal(module(x), before)
    assert unpatch(module) == 0


@pytest.mark.cuda
def test_other_input_types_come_back_as_they_came():
    module = linear(dtype=torch.bfloat16)
    x = inputs(1, 192, dtype=torch.float32)
    expected = module(x)
    patch(module)
    assert module(x).dtype == torch.float32
    torch.testing.assert_close(module(x), expected, rtol=0.03, atol=0.03 * expected.abs().max().item())


@pytest.mark.cuda
def test_gradients_keep_flowing():
    module, x = linear(), inputs(3, 192).requires_grad_()
    patch(module)
    module(x).sum().backward()
    torch.testing.assert_close(x.grad.float()[0], dense(module).sum(0), rtol=0.01, atol=0.05)
    with torch.no_grad():
        assert not module(x).requires_grad


@pytest.mark.cuda
def test_a_tiny_llama_generates_the_same_tokens():
    model = tiny_llama()
    ids = torch.arange(3, 15, device="cuda").view(2, 6)

    def generate() -> torch.Tensor:
        with torch.no_grad():
            return model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=16,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )

    expected = generate()
    assert patch(model) == 14
    with torch.no_grad():
        patched = model(ids).logits.float()
    assert torch.equal(generate(), expected)
    assert unpatch(model) == 14
    with torch.no_grad():
        plain = model(ids).logits.float()
    assert (patched - plain).abs().max() <= 0.02 * plain.abs().max()


def tiny_llama() -> nn.Module:
    """Two layers; the head is large, so that no two tokens are nearly as likely."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).half().eval()
    model.lm_head.weight.data *= 30
    for parent in list(model.model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                module = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=torch.float16, quant_type="nf4"
                )
                module.weight = bitsandbytes.nn.Params4bit(
                    child.weight.data, requires_grad=False, quant_type="nf4", module=module
                )
                setattr(parent, name, module)
    return model.cuda()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"quant_type": "fp4"}, "the weights are FP4, not NF4"),
        ({"shape": (64, 96)}, r"the shape is \[64, 96\]"),
    ],
)
def test_a_refusal_names_the_module_and_patches_nothing(options, why):
    model = nn.Sequential(linear(), linear(**options))
    with pytest.raises(LocalqError, match=f"1: {why}"):
        patch(model)
    assert "forward" not in vars(model[0])


@pytest.mark.cuda
def test_a_forward_that_something_else_replaced_is_left_alone():
    module = linear()
    module.forward = copy.copy(module.forward)
    with pytest.raises(LocalqError, match="has already been replaced"):
        patch(nn.Sequential(module))


def test_a_model_without_linear4bit_is_refused():
    with pytest.raises(LocalqError, match="the model has no Linear4bit"):
        patch(nn.Sequential(nn.Linear(4, 4)))


def test_kernels_that_fail_their_self_test_are_not_put_in(monkeypatch):
    def failing(device):
        raise LocalqError("GPU", "the kernel nf4_gemv produces wrong results")

    monkeypatch.setattr(patch_transformers, "_matrix", lambda module, path: None)
    module = linear(device="cpu")
    module.weight.quant_state = SimpleNamespace(dtype=torch.float16)
    monkeypatch.setattr(patch_transformers.selftest, "ensure", failing)
    with pytest.raises(LocalqError, match="nf4_gemv produces wrong results"):
        patch(nn.Sequential(module))
    assert "forward" not in vars(module)
    monkeypatch.setattr(patch_transformers.selftest, "ensure", lambda device: ("cannot be kept",))
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert patch(nn.Sequential(module)) == 1
    assert unpatch(module) == 1


def test_a_model_on_the_cpu_is_refused():
    with pytest.raises(LocalqError, match="1 is on cpu, not on a CUDA device"):
        patch(nn.Sequential(nn.Identity(), linear(device="cpu")))


def test_without_bitsandbytes_the_error_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.nn", None)
    with pytest.raises(LocalqError, match="bitsandbytes cannot be imported"):
        patch(nn.Identity())


def test_unpatch_of_what_was_not_patched_does_nothing():
    assert unpatch(nn.Sequential(nn.Linear(4, 4))) == 0


def state(**changes: object) -> SimpleNamespace:
    """A QuantState as bitsandbytes makes them for [6, 128]."""
    nested = SimpleNamespace(blocksize=256, absmax=torch.ones(1), code=nf4.dynamic_map())
    fields = {
        "quant_type": "nf4",
        "blocksize": 64,
        "shape": torch.Size([6, 128]),
        "nested": True,
        "state2": nested,
        "absmax": torch.zeros(12, dtype=torch.uint8),
        "offset": torch.tensor(0.25),
        "code": nf4.CODE_MAP,
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"nested": False, "state2": None}, ""),
        ({"quant_type": "fp4"}, "the weights are FP4, not NF4"),
        ({"blocksize": 128}, "the block size is 128"),
        ({"shape": torch.Size([6, 96])}, "the shape is [6, 96], not [out, in] with in % 64 == 0"),
        ({"state2": SimpleNamespace(blocksize=512)}, "the scales are quantized in blocks of 512; expected 256"),
    ],
)
def test_what_the_kernels_read(changes, why):
    assert why_not_readable(state(**changes)) == why


def test_a_matrix_lies_over_the_same_memory():
    codes = torch.zeros(192, 1, dtype=torch.bfloat16)
    matrix = matrix_of(codes, state())
    assert matrix.codes.dtype == torch.uint8
    assert matrix.codes.numel() == 384
    assert matrix.codes.data_ptr() == codes.data_ptr()
    assert (matrix.out_features, matrix.in_features, matrix.offset, matrix.tiled) == (6, 128, 0.25, False)
    assert matrix_of(codes, state(nested=False, state2=None)).nested_absmax is None
