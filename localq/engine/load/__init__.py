"""Loading a model: `load.py` is the sequence; `device.py` picks the device, `plan.py` context length and placement.

`weights.py` assigns checkpoint tensors to parameters and fills them (experts: `stacks.py`, `expert_pieces.py`,
`shared_experts.py`; head: `heads.py`; memory: `placing.py`); `draft.py` and `draft_head.py` load what drafts beside it;
`vram.py` measures CUDA and limits the allocator. What fits is decided by `localq.planner`, formats are in
`localq.formats`. Called by the engine, `quantize` and `bench`. Open `load.py` first.
"""
