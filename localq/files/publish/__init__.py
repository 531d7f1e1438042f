"""Publishing a model that `localq quantize` made: what is uploaded to the hub, and under which terms.

Here: the record of a conversion (`record`), the folder that is sent (`made_model`), terms of licences (`licences`),
the model card (`card`), what a repository has and lacks (`plan`, `remote_repo`), and the upload (`upload`,
`upload_client`, `errors`).
Not here: downloads (`files.hub`), and the question before an upload (`cli.verbs.push`).
Called by `cli.verbs.push`; `quantize` writes the record. Torch-free.
Open first: plan.py.
"""
