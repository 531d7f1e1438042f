"""The verbs of the command line, one file each; a helper's name begins with its verb.

Here: arguments, options and help of each verb, and the printing of its results.
Not here: options that verbs share (`cli/options`), the work itself (`planner`, `files`, `chat`, `quantize`, `bench`).
Called by: `cli/registry`, which imports the file of verb `x` when `localq x` runs; so heavy imports are in functions.
Open first: the file of the verb.
"""
