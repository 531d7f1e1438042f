"""The Hugging Face hub and its cache on this machine.

Here: what to download and in which order (`layout`, `fetch`), one file at a time (`download`, `parts`), the cache that
other tools share (`cache`, `records`, `leftovers`), repositories before they are downloaded (`remote`), weights that
are fetched while they are quantized (`shards`); proxies of the environment (`proxies`), pauses that are shown
(`pauses`).
Not here: the packaged model (`files.packaged_model`) and models on the disk (`files.local_models`).
`client` asks the hub, through `connection`, which limits the answers and has the access token. Torch-free.
Open first: fetch.py.
"""
