"""Instruments: speed with its roofline, the card, kernel times of a decode step, memory.

instrument_panel    the panel: when it draws, reads sensors and asks for a profile. Open this file first
instrument_facts    the data of all instruments, without widgets
instrument_widget   base of the instruments: speed_graph, card_line, kernel_bars, memory_bar

All figures come from the engine and NVML; an unknown figure is a dash. A hidden panel reads and draws nothing. Used by
`tui.chat`. Not here: the roofline (`planner.speed.roofline`), sensors (`localq.gpus`).
"""
