"""The output of a conversion: `folder.py` claims the folder and writes its small files, `shards.py` the weights.

`shards.py` also records which shards are finished: from there an interrupted conversion resumes its layers.
`resume_files.py` and `sensitivity_log.py` keep the state of joint training and of measured sensitivities;
`tensor_jobs.py` plans the tensors of `by_tensor`. No computation. Open `shards.py` first.
"""
