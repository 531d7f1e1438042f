"""The output of a conversion: `folder.py` claims the folder and writes its small files, `shards.py` the weights.

`tensor_jobs.py` plans the tensors of `by_tensor`; `resume_files.py` and `sensitivity_log.py` keep what an interrupted
conversion resumes from. No computation. Open `folder.py` first.
"""
