"""Predicted speed against every speed that was recorded, launch by launch and model by model; and on slower cards."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files import catalog, format_facts
from localq.files.architecture import Architecture
from localq.planner import footprint
from localq.planner.placement import Placement
from localq.planner.speed import cards, measurements, predict
from localq.planner.speed.measurements import Variant
from localq.planner.speed.predict import Machine
from tests.tools import results_tables
from tests.tools.results_tables import recorded_models

MEASURED_ON = predict.reference_machine()
LAUNCHES = [(kernel, *row) for kernel, rows in measurements.load().products.items() for row in rows]


def arch(name: str) -> Architecture:
    return catalog.find(name).arch


def predicted(name: str, format: str, scheme: str = "", placement: Placement | None = None, on: Machine = MEASURED_ON):
    return predict.tokens_per_s(arch(name), format, scheme, placement or Placement(), on)


@pytest.mark.parametrize(
    "model", recorded_models(), ids=lambda model: f"{model.name} {model.kv_bits} {model.depth} {model.tok_s:g}"
)
def test_every_model_that_was_measured_is_predicted_within_10_percent(model):
    name, _, format = model.name.partition("@")
    placement = Placement(model.kv_bits, model.embed, model.head)
    told = predict.tokens_per_s(arch(name), format, model.scheme, placement, MEASURED_ON, model.depth + predict.LIVE)
    assert told == pytest.approx(model.tok_s, rel=0.10)


@pytest.mark.parametrize(("kernel", "rows", "columns", "us"), LAUNCHES)
def test_every_launch_is_near_its_measured_time(kernel, rows, columns, us):
    variant = measurements.load().variant(kernel)
    assert predict.launch_us(kernel, rows, columns, variant, MEASURED_ON) == pytest.approx(us, rel=0.03)


@pytest.mark.parametrize(("kernel", "rows", "columns", "us"), [row for row in LAUNCHES if row[0] == "16 bit"])
def test_a_launch_is_near_what_the_others_say_of_it(kernel, rows, columns, us):
    """Of 16 bit, which its bytes explain; in other formats shapes fall into chunks, stripes and slices."""
    point = predict._points(kernel)[[row[1:] for row in LAUNCHES if row[0] == kernel].index((rows, columns, us))]
    cost = predict.fit_cost(kernel)
    fit = cost.fixed_us + cost.column_us * point[1] + cost.times * point[2]
    assert fit * predict.fit_residual(kernel, rows, columns, without=(rows, columns)) == pytest.approx(us, rel=0.08)


@pytest.mark.parametrize(("bits", "heads", "slots", "us"), measurements.load().attention)
def test_attention_is_near_its_measured_time(bits, heads, slots, us):
    shape = Architecture("llama", 1, heads * 128, heads, 8, 128, 1024, 32_000, False, 65_536)
    assert predict._attention(shape, bits, slots, MEASURED_ON) == pytest.approx(us, rel=0.16)


def test_attention_over_keys_and_values_of_different_bits_is_taken_to_cost_the_mean_of_both():
    shape = arch("llama-3.1-8b")
    both = [predict._attention(shape, bits, 32_768, MEASURED_ON) for bits in (8, 4)]
    assert predict._attention(shape, "k8v4", 32_768, MEASURED_ON) == pytest.approx(sum(both) / 2)


def test_recorded_figures_stand_in_the_results():
    """The data and the page that people read say the same."""
    page = (Path(__file__).parents[3] / "localq/bench/README.md").read_text()
    models, found = recorded_models(), measurements.load()
    assert len(models) >= 37
    for model in models:
        lines = [line for line in page.splitlines() if line.startswith(f"| {model.name} |")]
        behind = f"| {model.kv_bits} | {model.depth} |" if model.depth else "|"
        assert any(f"| {model.tok_s:g} |" in line and behind in line for line in lines), model
    for kernel, rows in found.products.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {kernel} | ") and " x " in line]
        assert all(f"{out} x {columns}: {us:g} " in line.replace(".0 ", " ") for out, columns, us in rows)
    for bits, heads, slots, us in (row for row in found.attention if row[2] != 1000):  # no command has that depth
        assert f"{bits} bit, {heads} heads, {slots} slots: {us:g} " in page


def test_every_figure_has_a_card_a_date_and_a_command():
    found = results_tables.results()
    used = {row[-1] for table in found["tables"].values() for row in table["rows"]}
    assert used == found["sources"].keys()
    assert all({"card", "date", "command"} <= source.keys() for source in found["sources"].values())
    timed = results_tables.data("measurements.toml")
    assert {row[-1] for rows in timed["products"].values() for row in rows} <= timed["sources"].keys()
    assert all("date" in source for source in timed["sources"].values())


@pytest.mark.parametrize(("name", "format"), [("llama-3.1-8b", "nf4"), ("gpt-oss-20b", "mxfp4"), ("phi-4", "vq2")])
def test_bytes_take_longer_on_a_slower_card_and_launches_do_not(name, format):
    """So a step is a line in the time of a byte, and less bandwidth brings a larger share of it."""
    rate, gathers = MEASURED_ON.read_bytes_per_s, MEASURED_ON.gather_bytes_per_s
    full, half, third = (1 / predicted(name, format, on=Machine(rate / part, gathers)) for part in (1, 2, 3))
    assert third - half == pytest.approx(half - full, rel=1e-6)
    assert full / 2 < half - full < 0.95 * full
    fast = Machine(measurements.load().read_bytes_per_s * 2, measurements.load().gather_bytes_per_s)
    assert 1 / full < predicted(name, format, on=fast) < 1.8 / full


@pytest.mark.parametrize("kernel", ["nf4", "16 bit", "8 bit", "vq2", "int4", "squeezellm", "bcq", "2x8"])
def test_what_launches_take_besides_their_bytes_is_in_the_record(kernel):
    """The best share of the bandwidth that all launches could have leaves more than twice the error of the fit."""
    cost, times = predict.fit_cost(kernel), [us for *_, us in measurements.load().products[kernel]]
    fits = [
        cost.fixed_us + cost.column_us * columns + cost.times * moved for _, columns, moved in predict._points(kernel)
    ]
    shares = [moved / us for (*_, moved), us in zip(predict._points(kernel), times, strict=True)]
    best = sum(shares) / sum(share**2 for share in shares)
    left = sum((fit / us - 1) ** 2 for fit, us in zip(fits, times, strict=True))
    assert sum((best * share - 1) ** 2 for share in shares) > 4 * left


def test_every_card_has_more_cycles_for_a_byte_and_none_a_shorter_latency():
    """What an efficiency of the H200 is carried over with; the latency of a slower clock is longer."""
    there = measurements.load().multiprocessor_ghz / cards.H200_PUBLISHED
    for card in cards.CARDS:
        assert card.multiprocessors * card.boost_ghz / (card.published_gb_per_s * 1e9) >= there
    latencies = {card.name: Machine.of(card).latency for card in cards.CARDS}
    assert min(latencies.values()) == latencies["RTX 4080"] == latencies["H200"] == 1.0
    assert latencies["A100"] == pytest.approx(1.83 / 1.41)
    slow = replace(Machine.of(cards.find("A100")), latency=1.0)
    assert predicted("llama-3.2-1b", "nf4", on=slow) > 1.1 * predicted(
        "llama-3.2-1b", "nf4", on=Machine.of(cards.find("A100"))
    )


def test_small_launches_are_not_slowed_by_the_bandwidth():
    """gpt-oss-20b reads 3.7 GB a token: 178 tok/s are what 660 GB/s allow."""
    card = Machine.of(cards.find("RTX 4080"))
    roof = card.read_bytes_per_s / predict.bytes_per_token(arch("gpt-oss-20b"), "mxfp4", "", Placement())
    assert predicted("gpt-oss-20b", "mxfp4", on=card) > 0.7 * roof
    assert predicted("smollm2-135m", "nf4", on=card) > 0.75 * predicted("smollm2-135m", "nf4")


def test_one_launch_does_not_tell_bytes_from_latency():
    """MXFP4 outside experts was measured at one small shape: a matrix 11 times as large is not 11 times as slow."""
    small, large = (predict.launch_us("mxfp4", rows, 2880, Variant("mxfp4"), MEASURED_ON) for rows in (2880, 11 * 2880))
    assert small == pytest.approx(5.0)
    assert large == pytest.approx(small + predict.fit_cost("mxfp4 experts").times * 10 * 2880 * 2880 * 17 / 32 / 4.42e6)


@pytest.mark.parametrize(("name", "window"), [("gemma-3-12b", 1024), ("gpt-oss-20b", 128)])
def test_a_windowed_layer_reads_no_more_than_its_window(name, window):
    """So behind a long text a token takes as much longer as the layers without a window read of it."""
    shape, format = arch(name), "mxfp4" if "oss" in name else "nf4"
    assert 0 < shape.window_layers < shape.layers
    near, far = (
        1 / predict.tokens_per_s(shape, format, "", Placement(), MEASURED_ON, live) for live in (window, 20_000)
    )
    whole = (shape.layers - shape.window_layers) * (20_000 - window) * shape.kv_bytes_per_token(16) / shape.layers
    assert far - near == pytest.approx(predict.fit_attention(16).times * whole / MEASURED_ON.read_bytes_per_s)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.3-70b", "qwen3-32b", "gemma-3-27b", "phi-4", "smollm2-135m"])
@pytest.mark.parametrize("format", ["nf4", "vq2", "bf16"])
def test_nothing_is_faster_than_its_bytes(name, format):
    for machine in (MEASURED_ON, Machine.of(cards.find("RTX 3090"))):
        roof = machine.read_bytes_per_s / predict.bytes_per_token(arch(name), format, "", Placement())
        assert 0 < predicted(name, format, on=machine) < 1.02 * roof


def test_what_is_gathered_depends_on_l2_and_not_on_memory():
    """All of it, latency too: half the sectors a second are half the speed of these products."""
    plain = Machine(1e12, measurements.load().gather_bytes_per_s)
    slower = Machine(1e12, measurements.load().gather_bytes_per_s / 2)
    for format, scheme in (("vptq", "v8-k65536-0"), ("aqlm", "1x16g8"), ("vptq", "v16-k65536-65536")):
        one, other = (predicted("llama-3.3-70b", format, scheme, on=on) for on in (plain, slower))
        assert 1.6 < one / other <= 2.0
    assert predicted("llama-3.3-70b", "vq2", on=plain) == predicted("llama-3.3-70b", "vq2", on=slower)
    gathered, looked_up = (predicted("llama-2-7b", "aqlm", scheme) for scheme in ("1x16g8", "2x8g8"))
    assert looked_up > 2 * gathered


def test_what_was_never_measured_has_no_speed():
    assert predicted("llama-3.1-8b", "awq", "g16") is None


def test_smaller_groups_are_more_to_read():
    assert predicted("llama-3.1-8b", "awq", "g32") < 0.96 * predicted("llama-3.1-8b", "awq", "g128")


@pytest.mark.parametrize(("name", "format", "roof"), [
    ("gpt-oss-20b", "mxfp4", 1160), ("qwen3-30b-a3b", "nf4", 2100), ("mixtral-8x7b", "nf4", 620),
])  # fmt: skip
def test_mixtures_cost_what_their_active_experts_cost(name, format, roof):
    """Roofs on an H200 by hand: 3.7 GB a token of gpt-oss, 1.0 + 0.5 + 0.6 of qwen3 (experts, attention, head)."""
    moved = predict.bytes_per_token(arch(name), format, "", Placement())
    assert MEASURED_ON.read_bytes_per_s / moved == pytest.approx(roof, rel=0.1)
    assert 0.2 * roof < predicted(name, format) < 0.75 * roof
    assert predicted(name, format, placement=Placement(head="8")) > predicted(name, format)


def test_attention_of_gpt_oss_in_nf4_is_less_to_read():
    """And hardly faster: 2,880 columns are no whole chunks of 512, where products by NF4 are slow."""
    assert predicted("gpt-oss-20b", "nf4") > predicted("gpt-oss-20b", "mxfp4")
    shape = arch("gpt-oss-20b")
    attention = sum(each.parameters for each in shape.linears if not each.expert)
    in_16_bit, in_nf4 = (predict.bytes_per_token(shape, format, "", Placement()) for format in ("mxfp4", "nf4"))
    assert in_16_bit - in_nf4 == pytest.approx(2 * attention - attention * 4.127 / 8, rel=0.001)
    assert footprint.idle_bytes(shape, "nf4") == footprint.idle_bytes(shape, "mxfp4")


def test_idle_experts_are_those_of_the_published_files():
    shape = arch("gpt-oss-20b")  # 24 layers of 32 experts, 4 of them active; blocks, scales and biases
    expert = 17 * (5760 + 2880) * 90 + 2 * (5760 + 2880)
    assert footprint.idle_bytes(shape, "mxfp4") == 24 * 28 * expert
    assert footprint.idle_bytes(arch("llama-3.1-8b"), "nf4") == 0
    shape, of_one = arch("qwen3-30b-a3b"), 3 * 768 * 2048 * 9 // 16  # NF4 with f32 scales, as it lies in memory
    assert footprint.idle_bytes(shape, "nf4") == 48 * 120 * of_one
    rest = sum(each.count * format_facts.matrix_bytes(each, "nf4") for each in shape.linears if not each.expert)
    rest += 2 * shape.other_parameters + 2 * shape.head_parameters + 2 * shape.hidden
    assert predict.bytes_per_token(shape, "nf4", "", Placement()) == 48 * 8 * of_one + rest


def test_bytes_per_token_by_hand():
    shape = arch("llama-3.1-8b")
    blocks = 2 * (shape.linear_parameters + shape.other_parameters)
    assert predict.bytes_per_token(shape, "bf16", "", Placement()) == blocks + 2 * 128_256 * 4096 + 2 * 4096
    assert predict.bytes_per_token(shape, "bf16", "", Placement(head="8")) == blocks + 128_256 * 4100 + 2 * 4096


@pytest.mark.parametrize(("said", "name"), [
    ("RTX 4090", "RTX 4090"), ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("4090", "RTX 4090"),
    ("rtx 3090 ti", "RTX 3090 Ti"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super"), ("3060ti", "RTX 3060 Ti"), ("NVIDIA H200", "H200"),
    ("NVIDIA A100-SXM4-80GB", "A100"), ("Radeon", None), ("", None), ("RTX 3050 Ti Laptop", None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"), ("4090 laptop", "RTX 4090 Laptop"),
    ("NVIDIA RTX 4000 Ada Generation", "RTX 4000 Ada"), ("NVIDIA RTX A6000", "RTX A6000"), ("NVIDIA L40S", "L40S"),
    ("NVIDIA RTX 4000 Ada Generation Laptop GPU", "RTX 4000 Ada Laptop"), ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"), ("NVIDIA H100 PCIe", "H100 PCIe"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Max-Q"), ("5090", "RTX 5090"),
    ("GeForce GTX 1660 SUPER", None), ("GeForce RTX 2080 Ti", None), ("Quadro RTX 6000", None), ("Tesla T4", None),
    ("AMD Radeon RX 7900 XTX", None), ("RTX 9999", None),
])  # fmt: skip
def test_cards_by_name(said, name):
    found = cards.match_card(said)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(("said", "total", "gib", "gb_per_s"), [
    ("RTX 3060", None, 12, 360), ("RTX 3060 8GB", None, 8, 240), ("NVIDIA GeForce RTX 3060", 8 * 2**30, 8, 240),
    ("NVIDIA GeForce RTX 3080", 12 * 2**30, 12, 912), ("RTX 4060 Ti 8 GB", None, 8, 288), ("A100 40G", None, 40, 1555),
    ("NVIDIA A100-PCIE-40GB", None, 40, 1555), ("RTX PRO 5000 Blackwell", 72 * 2**30, 72, 1344),
])  # fmt: skip
def test_of_two_sizes_of_a_card_the_one_that_is_meant_counts(said, total, gib, gb_per_s):
    found = cards.match_card(said, total)
    assert found is not None
    assert (found.gib, found.published_gb_per_s) == (gib, gb_per_s)


@pytest.mark.parametrize(("said", "what"), [
    ("RX 7900 XTX", "an AMD GPU"), ("AMD Radeon RX 9070", "an AMD GPU"), ("MI300X", "an AMD GPU"),
    ("Arc B580", "an Intel GPU"), ("M4 Max", "an Apple GPU"), ("Apple M2", "an Apple GPU"),
    ("GTX 1660 Super", "compute capability below 8.0"), ("RTX 2080 Ti", "compute capability below 8.0"),
    ("2080ti", "compute capability below 8.0"), ("Tesla T4", "compute capability below 8.0"),
    ("Quadro RTX 8000", "compute capability below 8.0"),
])  # fmt: skip
def test_a_card_that_localq_does_not_run_on_is_named_as_such(said, what):
    with pytest.raises(LocalqError, match="does not support") as raised:
        cards.find(said)
    assert what in raised.value.why
    assert "NVIDIA" in str(raised.value.next_step)


def test_cards_of_every_common_size_are_known():
    sizes = {card.gib for card in cards.CARDS}
    assert {6, 8, 10, 12, 16, 20, 24, 32, 48, 96} <= sizes
    assert set(cards.TYPICAL) == sizes


@pytest.mark.parametrize(("said", "near"), [
    ("RTX 4095", "RTX 4090"), ("RTX4080Ti", "RTX 4080"), ("A600", "RTX A6000"), ("5060 super", "RTX 5060"),
    ("Voodoo 2", ""), ("", ""),
])  # fmt: skip
def test_an_unknown_card_is_a_usage_error_that_names_the_three_nearest(said, near):
    with pytest.raises(LocalqError, match="not a known GPU") as raised:
        cards.find(said)
    assert raised.value.exit_code == ExitCode.USAGE
    named = str(raised.value.next_step).partition("GPUs: ")[2].partition(". ")[0].split(", ")
    assert len(named) == 3
    assert {*named} <= {card.name for card in cards.CARDS}
    assert near in (*named, "")
    assert "--vram SIZE" in str(raised.value.next_step)


@pytest.mark.parametrize("card", cards.CARDS, ids=lambda card: f"{card.name} {card.gib}")
def test_every_card_is_found_however_its_name_is_written(card):
    plain = (card.name, card.name.replace(" ", ""), card.name.replace(" ", "-"), card.name.replace(" ", "_"))
    bare = [each.replace("RTX", "", 1).strip(" -_") for each in plain]
    for said in (*plain, *bare, *(f"NVIDIA {each}" for each in plain), *(f"GeForce{each}" for each in plain)):
        for spelling in (said, said.lower(), said.upper()):
            found = cards.match_card(spelling)
            assert found is not None, spelling
            assert found.name == card.name, spelling
            for size in (f" {card.gib}GB", f"-{card.gib}gb", f" {card.gib} GiB"):
                assert cards.match_card(spelling + size) == card, spelling + size


def test_the_typical_cards_are_of_their_size():
    assert {cards.typical(gib).gib for gib in cards.TYPICAL} == set(cards.TYPICAL)
    assert cards.typical(11.5) is None


def test_what_is_said_of_formats_that_come_last_is_what_was_measured():
    """Of squeezellm that it is slower than NF4, on a card and by the record."""
    arch = catalog.find("llama-3.1-8b").arch
    slower, nf4 = (predict.tokens_per_s(arch, each, "", Placement(), MEASURED_ON) for each in ("squeezellm", "nf4"))
    assert (slower < nf4) == (format_facts.FORMATS["squeezellm"].offered_last == "slower than nf4")


def test_it_loads_no_torch():
    code = "import sys, localq.planner.speed.predict; assert not {'torch', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_shared_expert_is_one_more_of_the_chosen_where_it_is_like_them():
    shape, us = arch("qwen3.6-35b-a3b"), {}  # 8 of 256 experts of 512, and a shared one of 512
    for name, each in (("stacked", shape), ("none", replace(shape, shared_intermediate=0)),
                       ("wider", replace(shape, shared_intermediate=1024))):  # fmt: skip
        us[name] = 1e6 / predict.tokens_per_s(each, "nf4", "", Placement(head="8"), MEASURED_ON)
        assert format_facts.stacks_shared(each, "nf4") == (name == "stacked")
    assert us["stacked"] - us["none"] < 40 * 1.5, "two larger launches a layer"
    assert us["wider"] - us["none"] > 40 * 8, "two more launches a layer"
    assert [format_facts.stacks_shared(shape, each) for each in ("bf16", "mxfp4", "vq2")] == [True, False, False]
    assert not format_facts.stacks_shared(arch("qwen3-30b-a3b"), "nf4")


def test_nf4_scales_of_a_stacked_shared_expert_are_f32():
    shape = arch("qwen3.6-35b-a3b")
    apart = replace(shape, shared_intermediate=1024)
    one = 40 * 3 * 512 * 2048
    stacked, other = (footprint.placed_weights(each, "nf4") - footprint.weights_bytes(each, "nf4")["weights"]
                      for each in (shape, apart))  # fmt: skip
    tables = 40 * 3 * (4 * one // 40 // 3 // 64 // 256 + 4 * (16 + 256))  # of matrices with scales in u8
    assert stacked - other == 3 * one // 64 - tables
