"""The model picker and the screens of opening and fetching a model.

picker              the screen. Open this file first
picker_rows         rows, sort orders and filter, without widgets; picker_plans: what fits, and how fast
picker_table        the table and the filter field; picker_dialogs: questions and details
opening_screen      a model being opened or fetched; transfer_lines: its progress in lines

Opened by `tui.app`. Not here: plans themselves (`planner`), the thread that opens a model (`tui.jobs`).
"""
